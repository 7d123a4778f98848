// The warps of decode attention that load: one keys, one values, some tiles ahead and across the borders of
// sequences.
#pragma once

#include "decode_cursor.cuh"
#include "decode_shared.cuh"
#include "key_rows.cuh"

namespace ortolan::cuda {

constexpr int kLoadWarps = 2;

template <typename Element, int kHeadSize>
struct DecodeLoad {
  static constexpr int kStride = DecodeStage<kHeadSize>::kStride;
  using Copy = KeyTileCopy<kHeadSize, kWarpKeys, kStride, 32>;

  const SwaAttentionParams& params;
  const DecodeShape& shape;
  Visibility visibility;
  const Element* cache;  // keys or values
  int lane;

  // One tile; the 16 rows of a warp that nobody sees are left as they are.
  __device__ __forceinline__ void load(const DecodeCursor& cursor, Element* target) const {
    const DecodeEntry& entry = cursor.of;
    const KeyRows rows(params.cache, entry.sequence, entry.kv_head);
    const SeenPositions seen = SeenPositions::of(visibility, entry.first_position, entry.last_position);
    const int32_t first = cursor.key_tile() * shape.tile_keys;
    const int32_t slot = rows.first_slot(first);
    const bool is_plain = params.cache.head_size == kHeadSize &&
                          seen.hold_all(first, first + shape.tile_keys) &&
                          slot + shape.tile_keys <= rows.capacity;
    if (is_plain && !rows.pages) {
      Copy::start_rows(target, cache + rows.offset(slot), lane, shape.warps);
    } else if (is_plain && (slot | static_cast<int32_t>(params.cache.page_slots)) % kWarpKeys == 0) {
      load_pages(rows, slot, target);
    } else {
      for (int warp = 0; warp < shape.warps; ++warp) {
        const int32_t key = first + warp * kWarpKeys;
        if (seen.hold_any(key, key + kWarpKeys))
          Copy(rows, seen, key).start(target + warp * kWarpKeys * kStride, cache, lane);
      }
    }
  }

  // A tile whose 16 rows of each warp lie in one page. Lanes look up a page each.
  __device__ __forceinline__ void load_pages(const KeyRows& rows, int32_t slot, Element* target) const {
    const auto page_slots = static_cast<int32_t>(params.cache.page_slots);
    const int32_t first_page = slot / page_slots;
    const int32_t last_page = (slot + shape.tile_keys - 1) / page_slots;
    const int32_t page = first_page + lane <= last_page ? rows.pages[first_page + lane] : 0;
    const int64_t page_size = params.cache.num_kv_heads * page_slots * kHeadSize;
    int32_t row = slot - first_page * page_slots;
    int number = 0;
    for (int warp = 0; warp < shape.warps; ++warp) {
      const int64_t offset = __shfl_sync(~0u, page, number) * page_size + rows.head_offset + row * kHeadSize;
      Copy::start_rows(target + warp * kWarpKeys * kStride, cache + offset, lane, 1);
      row += kWarpKeys;
      if (row < page_slots) continue;
      row = 0;
      ++number;
    }
  }
};

}  // namespace ortolan::cuda
