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
  static constexpr int kCopyRows = 16;
  using Copy = KeyTileCopy<kHeadSize, kCopyRows, kStride, 32>;

  const SwaAttentionParams& params;
  const DecodeShape& shape;
  Visibility visibility;
  const Element* cache;  // keys or values
  int lane;

  // One tile; the rows of a warp that nobody sees are left as they are.
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
      Copy::start_rows(target, cache + rows.offset(slot), lane, shape.tile_keys / kCopyRows);
    } else if (is_plain && (slot | static_cast<int32_t>(params.cache.page_slots)) % kCopyRows == 0) {
      load_pages(rows, slot, target);
    } else {
      for (int row = 0; row < shape.tile_keys; row += kCopyRows) {
        const int32_t of_warp = first + row / kWarpKeys<kHeadSize> * kWarpKeys<kHeadSize>;
        if (seen.hold_any(of_warp, of_warp + kWarpKeys<kHeadSize>))
          Copy(rows, seen, first + row).start(target + row * kStride, cache, lane);
      }
    }
  }

  // A tile whose copies lie in one page each. Lanes look up a page each.
  __device__ __forceinline__ void load_pages(const KeyRows& rows, int32_t slot, Element* target) const {
    const auto page_slots = static_cast<int32_t>(params.cache.page_slots);
    const int32_t first_page = slot / page_slots;
    const int32_t last_page = (slot + shape.tile_keys - 1) / page_slots;
    const int32_t page = first_page + lane <= last_page ? rows.pages[first_page + lane] : 0;
    const int64_t page_size = params.cache.num_kv_heads * page_slots * kHeadSize;
    int32_t page_row = slot - first_page * page_slots;
    int number = 0;
    for (int row = 0; row < shape.tile_keys; row += kCopyRows) {
      const int64_t offset =
          __shfl_sync(~0u, page, number) * page_size + rows.head_offset + page_row * kHeadSize;
      Copy::start_rows(target + row * kStride, cache + offset, lane, 1);
      page_row += kCopyRows;
      if (page_row < page_slots) continue;
      page_row = 0;
      ++number;
    }
  }
};

}  // namespace ortolan::cuda
