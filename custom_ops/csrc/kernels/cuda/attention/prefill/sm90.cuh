// Prefill attention for sm_90a: wgmma fed by tensor copies, warps specialised.
//
// As many blocks as multiprocessors, each with tiles of query rows of one head after another. One warp finds
// them, and two load, queries and keys, and values, into rings of stages, running ahead into the block's next
// work. Warpgroups hold 64 rows each: products with the keys from shared memory, softmax in registers,
// weighted sums of the values with the weights from registers. A tile's softmax runs beside the weighted sums
// of the tile before it, and the groups take turns at issuing products. Key tiles are cut by position and
// taken in ascending order, so equal queries give equal bits however a prompt is cut; a group skips tiles
// that none of its rows sees. Heads of more than 256 columns are halved between the two blocks of a cluster:
// each multiplies half of the columns of queries, keys and values, and they add up one another's products
// with the keys. Source of the schedule: Shah et al., FlashAttention-3 (arXiv 2407.08608).
#pragma once

#include "kernels/cuda/attention/in_vain.cuh"
#include "sm90_load.cuh"
#include "sm90_rows.cuh"

namespace ortolan::cuda {

// A computing warpgroup's walk over the block's works.
template <typename Element, typename Shape>
struct Sm90Group {
  using Rows = Sm90Rows<Element, Shape>;
  const SwaAttentionParams& params;
  const typename Shape::Chunks& chunks;
  Sm90Shared<Shape>& shared;
  uint64_t keys;  // first tiles of the rings
  uint64_t values;
  uint32_t exchanged;  // see Sm90Exchange
  int first_column;
  int group;
  Logits logits;
  Turns<Shape> turns;
  Ring<Shape::kStages> key_at, value_at;
  uint32_t exchange_parity = 0;

  __device__ __forceinline__ uint64_t key_tile() const {
    return moved_tile(keys, key_at.place * Shape::kTileBytes);
  }
  __device__ __forceinline__ uint64_t value_tile() const {
    return moved_tile(values, value_at.place * Shape::kTileBytes);
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
                                        int32_t tile) {
    if constexpr (Shape::kBlocks > 1) shared.exchange.add_others(rows.z, exchanged, group, exchange_parity);
    if (logits.mapped) logits.map(rows.z);
    const int32_t first_key = tile * Shape::kKeys, first = work.first + group * chunks.tokens();
    const int32_t row = first + chunks.token(row_of_thread());
    const int32_t second_row = first + chunks.token(row_of_thread() + 8);
    if (first_key < common.oldest)
      rows.mask(work.visibility, row, second_row, first_key);
    else if (first_key + Shape::kKeys - 1 > common.newest)
      rows.mask_newest(work.visibility, row, second_row, first_key);
    rows.weigh(logits.factor);
  }

  // Key tiles begin .. end, all of which some of the group's rows see; but for the values of the last. The
  // first goes through the same code as the others: short works wait for instructions. So products that are
  // none stand for the values in front of it, and a barrier on which nobody waits is told that they are read.
  __device__ __forceinline__ void run(Rows& rows, const Sm90Work<Shape>& work, const SeenPositions& common,
                                      uint64_t queries, int32_t begin, int32_t end) {
    shared.keys.wait_full(key_at);
    turns.take();
    rows.start_keys(queries, key_tile());
    wgmma_commit();
    turns.pass();
    Barrier* values_read = &shared.nobody;
#pragma unroll 1
    for (int32_t tile = begin;;) {
      rows.template wait_keys<1>();
      shared.keys.release(key_at);
      weigh(rows, work, common, tile);
      rows.finish_values();
      values_read->arrive_once(threadIdx.x % 32);
      rows.round_weights();
      if (++tile == end) return;
      shared.keys.wait_full(key_at);
      turns.take();
      rows.start_keys(queries, key_tile());
      shared.values.wait_full(value_at);
      rows.start_values(value_tile());
      turns.pass();
      values_read = &shared.values.empty[value_at.place];
      value_at.advance();
    }
  }
  __device__ __forceinline__ void end_run(Rows& rows) {
    shared.values.wait_full(value_at);
    rows.start_values(value_tile());
    rows.wait_values();
    shared.values.release(value_at);
  }

  // Tiles of a work, in ascending order. Returns whether a run is left to be ended: queries are read no more.
  __device__ __forceinline__ bool visit(Rows& rows, const Sm90Work<Shape>& work, const Sm90OwnKeys& own_keys,
                                        const KeyTiles& visits, uint64_t queries) {
    const SeenPositions common = own_keys.common;
    KeyTiles own = own_keys.tiles;
    if (Shape::kIsShort) own.end = min(own.end, visits.end);
    const bool has_gap = own.sink_end < own.begin;
    for (int n = 0; n < visits.count();) {
      const int32_t tile = visits.at(n);
      if (tile >= own.end || (tile >= own.sink_end && tile < own.begin)) {
        pass_by();
        ++n;
        continue;
      }
      const int32_t end = has_gap && tile < own.sink_end ? own.sink_end : own.end;
      run(rows, work, common, queries, tile, end);
      n += end - tile;
      if (n == visits.count()) return true;
      end_run(rows);
    }
    return false;
  }

  // The thread's place among sums in memory.
  __device__ __forceinline__ float4* partial(int number) const {
    return chunks.partials + (int64_t{number} * Shape::kGroups + group) * Rows::kPieces * Rows::kPieceStride +
           threadIdx.x % 128;
  }
  // For whole groups: whether all others of so many sums are in memory.
  __device__ __forceinline__ bool is_last(int count, int sums) {
    const int barrier = Turns<Shape>::kFirstBarrier + Shape::kGroups + group;
    __threadfence();
    sync_warps<128>(barrier);
    if (threadIdx.x % 128 == 0) {
      const unsigned last = sums - 1;
      shared.is_last[group] = atomicInc(chunks.counts + count, last) == last;
    }
    sync_warps<128>(barrier);
    __threadfence();
    return shared.is_last[group];
  }
  // Sums at the places begin, begin + step .. end, in this order.
  __device__ __forceinline__ void merge(Rows& rows, int begin, int end, int step) const {
    rows.restore(partial(begin));
#pragma unroll(Rows::kColumns <= 128 ? 2 : 1)
    for (int place = begin + step; place < end; place += step) rows.add(partial(place), logits.factor);
  }

  // The spans of a short chunk's work; returns whether the rows are whole then.
  __device__ __forceinline__ bool visit_spans(Rows& rows, const Sm90Work<Shape>& work,
                                              const Sm90OwnKeys& own_keys, uint64_t queries) {
    using Spans = KeySpans<Shape::kKeys>;
    const SpanOfKeys& span = work.span;
    const bool has_others = span.count > 1 && work.count_tokens(group, chunks.tokens()) > 0;
    KeyTiles visits = work.visits;
    for (int number = span.number; visits.begin < work.visits.end; ++number, visits.begin = visits.end) {
      visits.end = min(Spans::first(number + 1), work.visits.end);
      rows.clear();
      if (visit(rows, work, own_keys, visits, queries)) end_run(rows);
      if (!span.is_alone && has_others) join(rows, number, span.count);
    }
    return !span.is_alone || !has_others || merge_spans(rows, span);
  }
  // The sums of a span join those in front of it, which the block has, too.
  __device__ __forceinline__ void join(Rows& rows, int number, int count) const {
    constexpr int kMerged = KeySpans<Shape::kKeys>::kMerged;
    float4 *merged = partial(2 * blockIdx.x), *all = partial(2 * blockIdx.x + 1);
    if (number % kMerged > 0) rows.add(merged, logits.factor);
    if (number + 1 < count && (number + 1) % kMerged > 0) return rows.save(merged);
    if (number >= kMerged) rows.add(all, logits.factor);
    if (number + 1 < count) rows.save(all);
  }
  // The same where other blocks have them. Returns whether all were there.
  __device__ __forceinline__ bool merge_spans(Rows& rows, const SpanOfKeys& span) {
    constexpr int kMerged = KeySpans<Shape::kKeys>::kMerged;
    const int round = span.number / kMerged, begin = round * kMerged, end = min(begin + kMerged, span.count);
    const int count = span.first_count + group, rounds = divide_up(span.count, kMerged);
    rows.save(partial(span.place + span.number));
    if (!is_last(count + (1 + round) * Shape::kGroups, end - begin)) return false;
    merge(rows, span.place + begin, span.place + end, 1);
    if (rounds == 1) return true;
    rows.save(partial(span.place + begin));
    if (!is_last(count, rounds)) return false;
    merge(rows, span.place, span.place + span.count, kMerged);
    return true;
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
      shared.queries.wait_full(query_at);
      const uint64_t own_queries =
          Rows::rows_tile(queries + query_at.place * Shape::kQueryBytes + group * 64 * 128);
      const Sm90OwnKeys& own_keys = shared.own_keys[work_at.place][group];
      bool is_whole = true, is_open = false;
      if constexpr (Shape::kIsShort) {
        is_whole = visit_spans(rows, work, own_keys, own_queries);
      } else {
        rows.clear();
        is_open = visit(rows, work, own_keys, work.visits, own_queries);
      }
      shared.queries.release(query_at);
      if (is_open) end_run(rows);
      if (is_whole) rows.store(params, chunks, work, group, first_column, logits.factor);
      shared.handed_works.release(work_at);
    }
    turns.end();
  }
};

template <typename Element, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sm90_prefill_kernel(const __grid_constant__ SwaAttentionParams params,
                        const __grid_constant__ Sm90Maps maps, const __grid_constant__ WorkQueue queue,
                        const __grid_constant__ typename Shape::Chunks chunks) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char shared_memory[];
  __shared__ Sm90Shared<Shape> shared;
  if constexpr (Shape::kIsShort)
    if (queue.is_behind && is_in_vain(params.packing, queue.own)) return;
  const uint32_t queries = (shared_address(shared_memory) + 1023) & ~1023u;
  const uint32_t keys = queries + Shape::kQueryStages * Shape::kQueryBytes;
  const uint32_t values = keys + Shape::kStages * Shape::kTileBytes;
  const int first_column = Shape::kBlocks > 1 ? cluster_rank() * Shape::kColumns : 0;
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (Shape::kBlocks > 1) cluster_sync();
  wait_for_previous_kernel();
  launch_dependents();

  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
  if (group == Shape::kGroups) {
    lower_registers<Shape::kLoadRegisters>();
    const Sm90Loader<Element, Shape> loader{params, maps, chunks, first_column};
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0) loader.bring_keys(shared, queries, keys);
    if (warp == 1) loader.bring_values(shared, values);
    if (warp == 2) loader.find_works(shared, queue);
  } else {
    raise_registers<Shape::kComputeRegisters>();
    using Rows = Sm90Rows<Element, Shape>;
    Sm90Group<Element, Shape> computing{params,
                                        chunks,
                                        shared,
                                        Rows::rows_tile(keys),
                                        Rows::values_tile(values),
                                        values + Shape::kStages * Shape::kTileBytes,
                                        first_column,
                                        group,
                                        Logits::of(params.scale, params.softcap),
                                        Turns<Shape>{group}};
    computing.compute(queries);
  }
  if (Shape::kBlocks > 1) cluster_sync();  // until then the other block writes here
#else
  refuse_architecture();
#endif
}

}  // namespace ortolan::cuda
