// The warps of an sm_90a prefill block that bring queries, keys and values to shared memory.
#pragma once

#include "kernels/cuda/common/tile_copy_sm90.cuh"
#include "sm90_work.cuh"

namespace ortolan::cuda {

template <typename Element, int kHeadSize, typename Shape>
struct Sm90Loader {
  const SwaAttentionParams& params;
  const Sm90Maps& maps;

  __device__ __forceinline__ void load(uint32_t target, const CUtensorMap& map, const void* cache,
                                       const Sm90Work<Shape>& work, int32_t tile, Barrier& full) const {
    const Sm90TileCopy<Element, kHeadSize, Shape::kKeys> copy{params.cache, work.tile.sequence, work.kv_head,
                                                              work.end, maps.box_rows};
    copy.start(target, map, cache, tile * Shape::kKeys, full);
  }

  __device__ __forceinline__ void load_queries(uint32_t target, const Sm90Work<Shape>& work,
                                               Barrier& full) const {
    full.arrive_expecting(Shape::kQueryBytes);
#pragma unroll
    for (int box = 0; box < Shape::kBoxes; ++box)
#pragma unroll
      for (int group = 0; group < Shape::kGroups; ++group)
        copy_box(target + (box * Shape::kRows + group * 64) * 128, maps.query, box * 64, work.head,
                 work.tile.first + group * 64, full);
  }

  // All of a block's works: what they are, their queries and keys.
  __device__ __forceinline__ void bring_keys(Sm90Shared<Shape>& shared, uint32_t queries, uint32_t keys,
                                             const WorkQueue& queue) const {
    const int lane = threadIdx.x % 32;
    Ring<Sm90Shared<Shape>::kWorks> work_at;
    Ring<Shape::kQueryStages> query_at;
    Ring<Shape::kStages> key_at;
    const auto hand_over = [&](const Sm90Work<Shape>& work) {
      if (lane == 0) shared.works[work_at.place] = work;
      __syncwarp();
      if (lane == 0) shared.handed_works.full[work_at.place].arrive();
    };
    unsigned following = 0;
    for (unsigned number = blockIdx.x; number < queue.works; number = __shfl_sync(~0u, following, 0)) {
      if (lane == 0) following = queue.take();
      Sm90Work<Shape> found;
      if (!found.find(params, number, queue.tiles, queue.section_heads)) continue;
      shared.handed_works.wait_empty(work_at);
      hand_over(found);
      const Sm90Work<Shape>& work = shared.works[work_at.place];  // registers are few
      work_at.advance();
      shared.queries.wait_empty(query_at);
      if (lane == 0)
        load_queries(queries + query_at.place * Shape::kQueryBytes, work,
                     shared.queries.full[query_at.place]);
      query_at.advance();
      for (int n = 0; n < work.visits.count(); ++n, key_at.advance()) {
        shared.keys.wait_empty(key_at);
        load(keys + key_at.place * Shape::kTileBytes, maps.keys, params.key_cache, work, work.visits.at(n),
             shared.keys.full[key_at.place]);
      }
    }
    if (lane == 0) queue.leave();
    shared.handed_works.wait_empty(work_at);
    hand_over({});
  }

  // Their values.
  __device__ __forceinline__ void bring_values(Sm90Shared<Shape>& shared, uint32_t values) const {
    Ring<Sm90Shared<Shape>::kWorks> work_at;
    Ring<Shape::kStages> value_at;
    for (;;) {
      shared.handed_works.wait_full(work_at);
      const Sm90Work<Shape>& work = shared.works[work_at.place];
      if (work.tile.sequence < 0) return;
      for (int n = 0; n < work.visits.count(); ++n, value_at.advance()) {
        shared.values.wait_empty(value_at);
        load(values + value_at.place * Shape::kTileBytes, maps.values, params.value_cache, work,
             work.visits.at(n), shared.values.full[value_at.place]);
      }
      shared.handed_works.release(work_at);
    }
  }
};

}  // namespace ortolan::cuda
