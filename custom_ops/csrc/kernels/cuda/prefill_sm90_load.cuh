// The warps of an sm_90a prefill block that bring queries, keys and values to shared memory.
#pragma once

#include "key_rows.cuh"
#include "prefill_sm90_work.cuh"

namespace ortolan::cuda {

template <typename Element, int kHeadSize, typename Shape>
struct Sm90Loader {
  const SwaAttentionParams& params;
  const Sm90Maps& maps;

  // Copies a tile of rows to `target`; the whole warp takes part. `full` expects one arrival.
  __device__ __forceinline__ void load(uint32_t target, const CUtensorMap& map, const void* cache,
                                       const Sm90Work<Shape>& work, int32_t first, Barrier& full) const {
    const int lane = threadIdx.x % 32;
    const KeyRows rows(params.cache, work.tile.sequence, work.kv_head);
    const int copies = Shape::kKeys / maps.box_rows;
    const int32_t slot = rows.first_slot(first + lane % copies * maps.box_rows);
    const bool is_plain = first + Shape::kKeys <= work.end && rows.are_adjacent(slot, maps.box_rows);
    if (__all_sync(~0u, is_plain)) {
      if (lane == 0) arrive_expecting(full, Shape::kTileBytes);
      __syncwarp();
      if (lane >= copies) return;
      const int64_t page = params.cache.page(work.tile.sequence, slot);
      const auto plane = static_cast<int32_t>(page * params.cache.num_kv_heads + work.kv_head);
      const int32_t row = rows.pages ? slot % static_cast<int32_t>(params.cache.page_slots) : slot;
#pragma unroll
      for (int box = 0; box < Shape::kBoxes; ++box)
        copy_box(target + box * Shape::kKeys * 128 + lane * maps.box_rows * 128, map, box * 64, row, plane,
                 full);
      return;
    }
    const auto* source = static_cast<const Element*>(cache);
    const int32_t first_slot = rows.first_slot(first);
#pragma unroll 1
    for (int i = lane; i < Shape::kKeys * kHeadSize / 8; i += 32) {
      const int row = i / (kHeadSize / 8), chunk = i % (kHeadSize / 8);
      const bool valid = first + row < work.end;
      const uint32_t place = target + chunk / 8 * Shape::kKeys * 128 + row * 128 + (chunk % 8 ^ row % 8) * 16;
      copy_async_16(place, source + (valid ? rows.offset(first_slot + row) + chunk * 8 : 0), valid);
    }
    copy_async_commit();
    copy_async_wait<0>();
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) full.arrive();
  }

  __device__ __forceinline__ void load_queries(uint32_t target, const Sm90Work<Shape>& work,
                                               Barrier& full) const {
    arrive_expecting(full, Shape::kQueryBytes);
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
    const Visibility visibility = Visibility::of(params);
    const int lane = threadIdx.x % 32;
    Ring<Sm90Shared<Shape>::kWorks> work_at;
    Ring<Shape::kQueryStages> query_at;
    Ring<Shape::kStages> key_at;
    const auto hand_over = [&](const Sm90Work<Shape>& work) {
      if (lane == 0) shared.works[work_at.stage] = work;
      __syncwarp();
      if (lane == 0) shared.handed_works.full[work_at.stage].arrive();
    };
    unsigned following = 0;
    for (unsigned number = blockIdx.x; number < queue.works; number = __shfl_sync(~0u, following, 0)) {
      if (lane == 0) following = queue.take();
      Sm90Work<Shape> found;
      if (!found.find(params, number, queue.tiles, queue.section_heads, visibility)) continue;
      shared.handed_works.wait_empty(work_at);
      hand_over(found);
      const Sm90Work<Shape>& work = shared.works[work_at.stage];  // registers are few
      work_at.advance();
      shared.queries.wait_empty(query_at);
      if (lane == 0)
        load_queries(queries + query_at.stage * Shape::kQueryBytes, work,
                     shared.queries.full[query_at.stage]);
      query_at.advance();
      for (int n = 0; n < work.visits.count(); ++n, key_at.advance()) {
        shared.keys.wait_empty(key_at);
        load(keys + key_at.stage * Shape::kTileBytes, maps.keys, params.key_cache, work,
             work.visits.at(n) * Shape::kKeys, shared.keys.full[key_at.stage]);
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
      const Sm90Work<Shape>& work = shared.works[work_at.stage];
      if (work.tile.sequence < 0) return;
      for (int n = 0; n < work.visits.count(); ++n, value_at.advance()) {
        shared.values.wait_empty(value_at);
        load(values + value_at.stage * Shape::kTileBytes, maps.values, params.value_cache, work,
             work.visits.at(n) * Shape::kKeys, shared.values.full[value_at.stage]);
      }
      shared.handed_works.release(work_at);
    }
  }
};

}  // namespace ortolan::cuda
