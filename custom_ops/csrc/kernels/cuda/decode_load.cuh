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
  static constexpr int kChunks = kHeadSize / 8;  // 16-byte pieces of a row
  using Copy = KeyTileCopy<kHeadSize, kCopyRows, kStride, 32>;

  const SwaAttentionParams& params;
  const DecodeShape& shape;
  Visibility visibility;
  const Element* cache;  // keys or values
  uint64_t policy;       // of L2
  int lane;

  // One tile; the rows of a warp that nobody sees are left as they are.
  __device__ __forceinline__ void load(const DecodeCursor& cursor, Element* target) const {
    const DecodeEntry& entry = cursor.of;
    const KeyRows rows(params.cache, entry.sequence, entry.kv_head);
    const SeenPositions seen = SeenPositions::of(visibility, entry.first_position, entry.last_position);
    const int32_t first = cursor.key_tile() * shape.tile_keys;
    const int32_t slot = rows.first_slot(first);
    const int32_t written = min(shape.tile_keys, entry.last_position + 1 - first);
    // Rows are as long as the kernel's head, and kCopyRows of them lie one after another.
    const bool is_regular =
        params.cache.head_size == kHeadSize && slot + written <= rows.capacity &&
        (!rows.pages || (slot | static_cast<int32_t>(params.cache.page_slots)) % kCopyRows == 0);
    if (is_regular) {
      const int whole = seen.hold_all(first, first + written) ? written / kCopyRows * kCopyRows : 0;
      if (rows.pages)
        load_pages(rows, slot, whole, target);
      else
        load_rows(shared_address(target), cache + rows.offset(slot), whole);
      load_cut(rows, seen, first, slot, whole, target);
    } else {
      for (int row = 0; row < shape.tile_keys; row += kCopyRows) {
        const int32_t of_warp = first + row / kWarpKeys<kHeadSize> * kWarpKeys<kHeadSize>;
        if (seen.hold_any(of_warp, of_warp + kWarpKeys<kHeadSize>))
          Copy(rows, seen, first + row).start(target + row * kStride, cache, lane);
      }
    }
  }

  // Adjacent rows that all are seen, kCopyRows at a time.
  __device__ __forceinline__ void load_rows(uint32_t target, const Element* source, int num_rows) const {
    target += (lane / kChunks * kStride + lane % kChunks * 8) * 2;
    source += lane * 8;
    for (int row = 0; row < num_rows; row += kCopyRows) {
      Copy::start_regular(target, source, policy);
      target += kCopyRows * kStride * 2;
      source += kCopyRows * kHeadSize;
    }
  }

  // The rows of a tile from `row` on, of which not all are seen.
  __device__ __forceinline__ void load_cut(const KeyRows& rows, const SeenPositions& seen, int32_t first,
                                           int32_t slot, int row, Element* target) const {
    const uint32_t start = shared_address(target + lane / kChunks * kStride + lane % kChunks * 8);
#pragma unroll 1
    for (; row < shape.tile_keys; row += kCopyRows) {
      const int32_t of_warp = first + row / kWarpKeys<kHeadSize> * kWarpKeys<kHeadSize>;
      if (!seen.hold_any(of_warp, of_warp + kWarpKeys<kHeadSize>)) continue;
      const Element* source = cache + rows.offset(slot + row);
      if (seen.hold_all(first + row, first + row + kCopyRows)) {
        load_rows(shared_address(target + row * kStride), source, kCopyRows);
        continue;
      }
#pragma unroll 4
      for (int n = 0; n < kCopyRows * kChunks; n += 32) {
        const bool valid = seen.holds(first + row + (n + lane) / kChunks);
        copy_async_16(start + ((row + n / kChunks) * kStride + n % kChunks * 8) * 2,
                      source + (valid ? (n + lane) * 8 : 0), valid);
      }
    }
  }

  // The same of a paged tile whose copies lie in one page each. Lanes look up a page each.
  __device__ __forceinline__ void load_pages(const KeyRows& rows, int32_t slot, int num_rows,
                                             Element* target) const {
    const auto page_slots = static_cast<int32_t>(params.cache.page_slots);
    const int32_t first_page = slot / page_slots;
    const int32_t last_page = (slot + num_rows - 1) / page_slots;
    const int32_t page = first_page + lane <= last_page ? rows.pages[first_page + lane] : 0;
    const int64_t page_size = params.cache.num_kv_heads * page_slots * kHeadSize;
    int32_t page_row = slot - first_page * page_slots;
    int number = 0;
    for (int row = 0; row < num_rows; row += kCopyRows) {
      const int64_t offset =
          __shfl_sync(~0u, page, number) * page_size + rows.head_offset + page_row * kHeadSize;
      load_rows(shared_address(target + row * kStride), cache + offset, kCopyRows);
      page_row += kCopyRows;
      if (page_row < page_slots) continue;
      page_row = 0;
      ++number;
    }
  }
};

}  // namespace ortolan::cuda
