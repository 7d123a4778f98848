// The warps of an sm_90a prefill block that bring queries, keys and values to shared memory.
#pragma once

#include "kernels/cuda/common/tile_copy_sm90.cuh"
#include "sm90_work.cuh"

namespace ortolan::cuda {

template <typename Element, typename Shape>
struct Sm90Loader {
  using Shared = Sm90Shared<Shape>;
  const SwaAttentionParams& params;
  const Sm90Maps& maps;
  const typename Shape::Chunks& chunks;
  int first_column;

  using TileCopy = Sm90TileCopy<Element, Shape::kColumns, Shape::kKeys>;

  __device__ __forceinline__ TileCopy tile_copy(const Sm90Work<Shape>& work) const {
    return {params.cache, work.tile.sequence, work.kv_head, work.end, maps.box_rows, first_column};
  }
  static __device__ __forceinline__ bool cuts(const Sm90Work<Shape>& work, int32_t first) {
    return first + Shape::kKeys > work.end;
  }

  // Keys past the end of the sequence may be anything: nobody sees them.
  __device__ __forceinline__ void load_keys(uint32_t target, const Sm90Work<Shape>& work, int32_t first,
                                            Barrier& full) const {
    const TileCopy copy = tile_copy(work);
    if (cuts(work, first) && copy.start_cut(target, maps.keys, first, full)) return;
    copy.start(target, maps.keys, params.key_cache, first, full);
  }
  // Values past it have weights of zero, but may be NaN. `landed`: where they arrive before they are cleared.
  __device__ __forceinline__ void load_values(uint32_t target, const Sm90Work<Shape>& work, int32_t first,
                                              Barrier& full, Barrier& landed, uint32_t& parity) const {
    const TileCopy copy = tile_copy(work);
    if (!cuts(work, first) || !copy.start_cut(target, maps.values, first, landed)) {
      copy.start(target, maps.values, params.value_cache, first, full);
      return;
    }
    landed.wait(parity);
    parity ^= 1;
    copy.clear_past_end(target, first);
    if (threadIdx.x % 32 == 0) full.arrive();
  }

  __device__ __forceinline__ void load_queries(uint32_t target, const Sm90Work<Shape>& work,
                                               Barrier& full) const {
    const int tokens = chunks.tokens();
    full.arrive_expecting(Shape::kGroups * Shape::kBoxes * 128 * tokens * chunks.heads());
#pragma unroll
    for (int box = 0; box < Shape::kBoxes; ++box)
#pragma unroll
      for (int group = 0; group < Shape::kGroups; ++group)
        copy_box(target + (box * Shape::kRows + group * 64) * 128, maps.query, first_column + box * 64,
                 work.head, work.tile.first + group * tokens, full);
  }

  // Which works are the block's, and what each warpgroup sees of their keys: found while others are loaded,
  // as lengths take long to read.
  __device__ __forceinline__ void find_works(Shared& shared, const WorkQueue& queue) const {
    const int lane = threadIdx.x % 32;
    const auto works = Sm90WorkList<Shape>::of(params, chunks, queue.own);
    Ring<Shared::kWorks> work_at;
    uint32_t wanted_parity = 0;
    unsigned round = 0;
    for (bool exists = true; exists; work_at.advance()) {
      shared.handed_works.wait_empty(work_at);
      Sm90Work<Shape> work;
      for (bool is_found = false; !is_found;) {
        const unsigned number = queue.take<Shape::kBlocks>(round++);
        exists = number < works.count;
        work = {};
        is_found = !exists || works.find(params, chunks, queue, number, work);
      }
      if (lane == 0) shared.works[work_at.place] = work;
      if (lane < Shape::kGroups) shared.own_keys[work_at.place][lane] = work.own_keys(lane, chunks.tokens());
      __syncwarp();
      if (lane == 0) shared.handed_works.full[work_at.place].arrive();
      if (!exists || work.visits.count() <= Shared::kTilesAhead) continue;
      shared.wants_work.wait(wanted_parity);
      wanted_parity ^= 1;
    }
    if (lane == 0 && works.count > 0) queue.leave<Shape::kBlocks>();  // else none has taken any
  }

  // Their queries and keys.
  __device__ __forceinline__ void bring_keys(Shared& shared, uint32_t queries, uint32_t keys) const {
    const int lane = threadIdx.x % 32;
    Ring<Shared::kWorks> work_at;
    Ring<Shape::kQueryStages> query_at;
    Ring<Shape::kStages> key_at;
    for (;;) {
      shared.handed_works.wait_full(work_at);
      const Sm90Work<Shape>& work = shared.works[work_at.place];  // registers are few
      if (work.tile.sequence < 0) return;
      shared.queries.wait_empty(query_at);
      if (lane == 0)
        load_queries(queries + query_at.place * Shape::kQueryBytes, work,
                     shared.queries.full[query_at.place]);
      query_at.advance();
      for (int n = 0; n < work.visits.count(); ++n, key_at.advance()) {
        if (lane == 0 && n + Shared::kTilesAhead == work.visits.count() - 1) shared.wants_work.arrive();
        shared.keys.wait_empty(key_at);
        load_keys(keys + key_at.place * Shape::kTileBytes, work, work.visits.at(n) * Shape::kKeys,
                  shared.keys.full[key_at.place]);
      }
      shared.handed_works.release(work_at);
    }
  }

  // Their values.
  __device__ __forceinline__ void bring_values(Shared& shared, uint32_t values) const {
    Ring<Shared::kWorks> work_at;
    Ring<Shape::kStages> value_at;
    uint32_t landed_parity = 0;
    for (;;) {
      shared.handed_works.wait_full(work_at);
      const Sm90Work<Shape>& work = shared.works[work_at.place];
      if (work.tile.sequence < 0) return;
      for (int n = 0; n < work.visits.count(); ++n, value_at.advance()) {
        shared.values.wait_empty(value_at);
        load_values(values + value_at.place * Shape::kTileBytes, work, work.visits.at(n) * Shape::kKeys,
                    shared.values.full[value_at.place], shared.landed, landed_parity);
      }
      shared.handed_works.release(work_at);
    }
  }
};

}  // namespace ortolan::cuda
