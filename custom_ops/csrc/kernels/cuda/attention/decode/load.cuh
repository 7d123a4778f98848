// The warps of decode attention that load: one keys, one values, some tiles ahead and across the borders of
// sequences.
#pragma once

#include <utility>

#include "cursor.cuh"
#include "kernels/cuda/attention/key_rows.cuh"
#include "shared.cuh"

namespace ortolan::cuda {

constexpr int kLoadWarps = 2;

template <typename Rows>
struct DecodeLoad {
  using Stage = DecodeStage<Rows>;
  using Stored = typename Rows::Stored;
  static constexpr int kHeadSize = Rows::kHeadSize;
  static constexpr int kCopyRows = 16;
  static constexpr int kPiece = 16 / static_cast<int>(sizeof(Stored));  // elements of 16 bytes
  static constexpr int kChunks = kHeadSize / kPiece;                    // such pieces of a row

  const SwaAttentionParams& params;
  const DecodeShape& shape;
  const Stored* cache;  // keys or values
  const float* scales;  // theirs, where rows have some
  uint64_t policy;      // of L2
  int lane;

  // One tile, to an address in shared memory; the rows of a warp that nobody sees are left as they are.
  __device__ __forceinline__ void load(const DecodeCursor& cursor, uint32_t target) const {
    const DecodeEntry& entry = cursor.of;
    const KeyRows rows(params.cache, entry.sequence, entry.kv_head);
    const SeenPositions seen = entry.seen();
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
        load_rows(target, cache + rows.offset(slot), whole);
      load_cut(rows, seen, first, whole, target);
    } else {
      load_cut(rows, seen, first, 0, target);
    }
  }

  // Adjacent rows that all are seen, kCopyRows at a time.
  __device__ __forceinline__ void load_rows(uint32_t target, const Stored* source, int num_rows) const {
    const uint32_t piece = (lane % kChunks % 8 ^ Stage::turn(lane / kChunks)) * 16;
    target += lane / kChunks * Stage::kRowBytes + lane % kChunks / 8 * 128;
    source += lane * kPiece;
#pragma unroll 1
    for (int first = 0; first < num_rows; first += kCopyRows) {
      start_copies(target, piece, source, std::make_integer_sequence<int, kCopyRows * kChunks / 32>{});
      target += kCopyRows * Stage::kRowBytes;
      source += kCopyRows * kHeadSize;
    }
  }

  // How pieces of a row lie, against those of the lane's first row.
  template <int kRow>
  static constexpr int kTurn = (kChunks < 8 ? 0 : kRow % 8) * 16;

  // `target` and `source` of the lane's first piece, but for the order of pieces; copies of lane 0 begin a
  // row or, where rows are longer than what all lanes copy at once, are a part of one.
  template <int... kNumbers>
  __device__ __forceinline__ void start_copies(uint32_t target, uint32_t piece, const Stored* source,
                                               std::integer_sequence<int, kNumbers...>) const {
    (copy_async_16_at<kNumbers * 32 / kChunks * Stage::kRowBytes + kNumbers * 32 % kChunks * 16,
                      kNumbers * 512>(target + (piece ^ kTurn<kNumbers * 32 / kChunks>), source, policy),
     ...);
  }

  // The rows of a tile from `row` on, wherever they lie, seen or not, and of whatever length.
  __device__ __forceinline__ void load_cut(const KeyRows& rows, const SeenPositions& seen, int32_t first,
                                           int row, uint32_t target) const {
#pragma unroll 1
    for (; row < shape.tile_keys; row += kCopyRows) {
      const int32_t of_warp = first + row / Rows::kWarpKeys * Rows::kWarpKeys;
      if (!seen.hold_any(of_warp, of_warp + Rows::kWarpKeys)) continue;
      const int32_t slot = rows.first_slot(first + row);
      const bool is_adjacent = params.cache.head_size == kHeadSize && rows.are_adjacent(slot, kCopyRows);
      const Stored* source = is_adjacent ? cache + rows.offset(slot) : nullptr;
      if (is_adjacent && seen.hold_all(first + row, first + row + kCopyRows)) {
        load_rows(target + row * Stage::kRowBytes, source, kCopyRows);
        continue;
      }
#pragma unroll 4
      for (int n = lane; n < kCopyRows * kChunks; n += 32) {
        const int piece_row = row + n / kChunks, piece = n % kChunks;
        const bool valid = seen.holds(first + piece_row) && piece * kPiece < params.cache.head_size;
        const Stored* of_row = !valid        ? cache
                               : is_adjacent ? source + n / kChunks * kHeadSize
                                             : cache + rows.offset(slot + n / kChunks);
        copy_async_16(target + Stage::place(piece_row, piece), of_row + (valid ? piece * kPiece : 0), valid);
      }
    }
  }

  // The scales of a tile's rows; those of rows that nobody sees become zeros.
  __device__ __forceinline__ void load_scales(const DecodeCursor& cursor, uint32_t target) const {
    const DecodeEntry& entry = cursor.of;
    const KeyRows rows(params.cache, entry.sequence, entry.kv_head);
    const SeenPositions seen = entry.seen();
    const int32_t first = cursor.key_tile() * shape.tile_keys;
    const int32_t slot = rows.first_slot(first);
#pragma unroll 2
    for (int row = lane; row < shape.tile_keys; row += 32) {
      const bool valid = seen.holds(first + row);
      copy_async_4(target + row * static_cast<int>(sizeof(float)),
                   scales + (valid ? rows.number(slot + row) : 0), valid);
    }
  }

  // Adjacent rows of a paged tile whose copies lie in one page each. Lanes look up a page each.
  __device__ __forceinline__ void load_pages(const KeyRows& rows, int32_t slot, int num_rows,
                                             uint32_t target) const {
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
      load_rows(target + row * Stage::kRowBytes, cache + offset, kCopyRows);
      page_row += kCopyRows;
      if (page_row < page_slots) continue;
      page_row = 0;
      ++number;
    }
  }
};

}  // namespace ortolan::cuda
