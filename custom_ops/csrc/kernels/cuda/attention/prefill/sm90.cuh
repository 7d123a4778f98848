// Prefill attention for sm_90a: wgmma fed by tensor copies, warps specialised.
//
// As many blocks as multiprocessors, each with tiles of query rows of one head after another. Two warps load,
// queries and keys, and values, into rings of stages, running ahead into the block's next work. Warpgroups
// hold 64 rows each: products with the keys from shared memory, softmax in registers, weighted sums of the
// values with the weights from registers. A tile's softmax runs beside the weighted sums of the tile before
// it, and the groups take turns at issuing products. Key tiles are cut by position and taken in ascending
// order, so equal queries give equal bits however a prompt is cut; a group skips tiles that none of its rows
// sees. Source of the schedule: Shah et al., FlashAttention-3 (arXiv 2407.08608).
#pragma once

#include "sm90_load.cuh"
#include "sm90_rows.cuh"

namespace ortolan::cuda {

// A computing warpgroup's walk over the block's works.
template <typename Element, int kHeadSize, typename Shape>
struct Sm90Group {
  using Rows = Sm90Rows<Element, kHeadSize, Shape>;
  const SwaAttentionParams& params;
  Sm90Shared<Shape>& shared;
  uint32_t keys;  // addresses of the rings
  uint32_t values;
  int group;
  Logits logits;
  Turns<Shape> turns;
  Ring<Shape::kStages> key_at, value_at;

  __device__ __forceinline__ uint32_t key_tile() const { return keys + key_at.place * Shape::kTileBytes; }
  __device__ __forceinline__ uint32_t value_tile() const {
    return values + value_at.place * Shape::kTileBytes;
  }

  static __device__ __forceinline__ int row_of_thread() {
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }

  // A tile that none of the group's rows sees.
  __device__ __forceinline__ void pass_by() {
    shared.keys.wait_full(key_at);
    turns.take();
    turns.pass();
    shared.keys.release(key_at);
    shared.values.wait_full(value_at);
    shared.values.release(value_at);
  }

  // Products with tile `tile` become weights. `common`: what all of the group's rows see.
  __device__ __forceinline__ void weigh(Rows& rows, const Sm90Work<Shape>& work, const SeenPositions& common,
                                        int32_t tile) const {
    if (logits.mapped) logits.map(rows.z);
    const int32_t first_key = tile * Shape::kKeys;
    if (first_key < common.oldest || first_key + Shape::kKeys - 1 > common.newest)
      rows.mask(work.visibility, work.first + group * 64 + row_of_thread(), first_key);
    rows.weigh(logits.factor);
  }

  // Key tiles begin .. end, all of which some of the group's rows see.
  __device__ __forceinline__ void run(Rows& rows, const Sm90Work<Shape>& work, uint32_t queries,
                                      int32_t begin, int32_t end) {
    const int32_t first_row = work.first + group * 64;
    const SeenPositions common = work.visibility.of_each(first_row, first_row + 63);
    shared.keys.wait_full(key_at);
    turns.take();
    rows.start_keys(queries, key_tile());
    turns.pass();
    rows.template wait_keys<0>();
    shared.keys.release(key_at);
    weigh(rows, work, common, begin);
    rows.rescale_sums();
    rows.round_weights();
#pragma unroll 1
    for (int32_t tile = begin + 1; tile < end; ++tile) {
      shared.keys.wait_full(key_at);
      turns.take();
      rows.start_keys(queries, key_tile());
      shared.values.wait_full(value_at);
      rows.start_values(value_tile());
      turns.pass();
      rows.template wait_keys<1>();
      shared.keys.release(key_at);
      weigh(rows, work, common, tile);
      rows.wait_values();
      shared.values.release(value_at);
      rows.rescale_sums();
      rows.round_weights();
    }
    shared.values.wait_full(value_at);
    rows.start_values(value_tile());
    rows.wait_values();
    shared.values.release(value_at);
  }

  // All tiles of a work, in ascending order.
  __device__ __forceinline__ void visit(Rows& rows, const Sm90Work<Shape>& work, uint32_t queries) {
    const int count = min(64, work.tile.count - group * 64);
    const KeyTiles own = count > 0 ? work.of_rows(group * 64, count) : KeyTiles{};
    const bool has_gap = own.sink_end < own.begin;
    for (int n = 0; n < work.visits.count();) {
      const int32_t tile = work.visits.at(n);
      if (tile >= own.end || (tile >= own.sink_end && tile < own.begin)) {
        pass_by();
        ++n;
        continue;
      }
      const int32_t end = has_gap && tile < own.sink_end ? own.sink_end : own.end;
      run(rows, work, queries, tile, end);
      n += end - tile;
    }
  }

  __device__ __forceinline__ void compute(uint32_t queries) {
    Ring<Sm90Shared<Shape>::kWorks> work_at;
    Ring<Shape::kQueryStages> query_at;
    Rows rows;
    turns.begin();
    for (;;) {
      shared.handed_works.wait_full(work_at);
      const Sm90Work<Shape>& work = shared.works[work_at.place];
      if (work.tile.sequence < 0) break;
      rows.clear();
      shared.queries.wait_full(query_at);
      visit(rows, work, queries + query_at.place * Shape::kQueryBytes + group * 64 * 128);
      shared.queries.release(query_at);
      rows.store(params, work, group * 64 + row_of_thread(), logits.factor);
      shared.handed_works.release(work_at);
    }
    turns.end();
  }
};

template <typename Element, int kHeadSize, int kKeyRows>
__global__ void __launch_bounds__(Sm90Shape<kHeadSize, kKeyRows>::kThreads, 1)
    sm90_prefill_kernel(const __grid_constant__ SwaAttentionParams params,
                        const __grid_constant__ Sm90Maps maps, const __grid_constant__ WorkQueue queue) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = Sm90Shape<kHeadSize, kKeyRows>;
  extern __shared__ unsigned char shared_memory[];
  __shared__ Sm90Shared<Shape> shared;
  const uint32_t queries = (shared_address(shared_memory) + 1023) & ~1023u;
  const uint32_t keys = queries + Shape::kQueryStages * Shape::kQueryBytes;
  const uint32_t values = keys + Shape::kStages * Shape::kTileBytes;
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  wait_for_previous_kernel();
  launch_dependents();

  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
  if (group == Shape::kGroups) {
    lower_registers<Shape::kLoadRegisters>();
    const Sm90Loader<Element, kHeadSize, Shape> loader{params, maps};
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0) loader.bring_keys(shared, queries, keys, queue);
    if (warp == 1) loader.bring_values(shared, values);
    return;
  }
  raise_registers<Shape::kComputeRegisters>();
  Sm90Group<Element, kHeadSize, Shape> computing{
      params, shared, keys, values, group, Logits::of(params.scale, params.softcap), Turns<Shape>{group}};
  computing.compute(queries);
#else
  refuse_architecture();
#endif
}

}  // namespace ortolan::cuda
