// The warps of decode attention that load: some keys, as many values, some tiles ahead and across the borders
// of sequences.
#pragma once

#include <utility>

#include "cursor.cuh"
#include "kernels/cuda/attention/key_rows.cuh"
#include "shared.cuh"

namespace ortolan::cuda {

template <typename Rows>
constexpr int kLoadWarps = 2 * Rows::kLoadParts;

template <typename Rows>
struct DecodeLoad {
  using Stage = DecodeStage<Rows>;
  using Stored = typename Rows::Stored;
  static constexpr int kHeadSize = Rows::kHeadSize;
  static constexpr int kCopyRows = 16;
  static constexpr int kPiece = 16 / static_cast<int>(sizeof(Stored));  // elements of 16 bytes
  static constexpr int kChunks = kHeadSize / kPiece;                    // such pieces of a row
  static constexpr int kScale = static_cast<int>(sizeof(float));

  const SwaAttentionParams& params;
  const DecodeShape& shape;
  const Stored* cache;  // keys or values
  const float* scales;  // theirs, where rows have some
  uint64_t policy;      // of L2
  int part;             // of a tile
  int lane;

  __device__ __forceinline__ int part_keys() const { return shape.tile_keys / Rows::kLoadParts; }
  __device__ __forceinline__ int first_row() const { return Rows::kLoadParts > 1 ? part * part_keys() : 0; }

  // Its part of a tile, to the tile's address in shared memory; the rows of a warp that nobody sees are left
  // as they are.
  __device__ __forceinline__ void load(const DecodeCursor& cursor, uint32_t target) const {
    const DecodeEntry& entry = cursor.of;
    const KeyRows rows(params.cache, entry.sequence, entry.kv_head);
    const SeenPositions seen = entry.seen();
    const int32_t first = cursor.key_tile() * shape.tile_keys + first_row();
    const int32_t slot = rows.first_slot(first);
    const int32_t written = min(part_keys(), max(entry.last_position + 1 - first, 0));
    target += first_row() * Stage::kRowBytes;
    // kCopyRows of the rows lie one after another.
    const bool is_regular =
        slot + written <= rows.capacity &&
        (!rows.pages || (slot | static_cast<int32_t>(params.cache.page_slots)) % kCopyRows == 0);
    if (is_regular) {
      const int whole = seen.hold_all(first, first + written) ? written / kCopyRows * kCopyRows : 0;
      if (rows.pages)
        load_pages(rows, slot, whole, target);
      else
        load_adjacent(target, cache + rows.offset(slot), whole);
      load_cut(rows, seen, first, slot, whole, target);
    } else {
      load_cut(rows, seen, first, slot, 0, target);
    }
  }

  // Adjacent rows that all are seen, a multiple of kCopyRows.
  __device__ __forceinline__ void load_adjacent(uint32_t target, const Stored* source, int num_rows) const {
    if (params.cache.head_size < kHeadSize)
      load_short_rows(target, source, num_rows);
    else
      load_rows(target, source, num_rows);
  }

  // Rows shorter than the kernel's head; the rest of their places stays as it is: the block has cleared it.
  // Lanes copy the same pieces of row after row, some nothing.
  __device__ __forceinline__ void load_short_rows(uint32_t target, const Stored* source, int num_rows) const {
    constexpr int kLanes = kChunks < 32 ? kChunks : 32, kRows = 32 / kLanes;  // of a row; at once
    const int row_size = static_cast<int>(params.cache.head_size);
#pragma unroll 1
    for (int piece = lane % kLanes; piece * kPiece < row_size; piece += kLanes) {
      const Stored* from = source + lane / kLanes * row_size + piece * kPiece;
#pragma unroll 8
      for (int row = lane / kLanes; row < num_rows; row += kRows, from += kRows * row_size)
        copy_async_16(target + Stage::place(row, piece), from, true, policy);
    }
  }

  // Rows of the kernel's head, kCopyRows at a time.
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
                                           int32_t first_slot, int row, uint32_t target) const {
#pragma unroll 1
    for (; row < part_keys(); row += kCopyRows) {
      const int32_t of_warp = (first + row) / Rows::kWarpKeys * Rows::kWarpKeys;
      if (!seen.hold_any(of_warp, of_warp + Rows::kWarpKeys)) continue;
      const int32_t slot = rows.slot_behind(first_slot, row);
      const bool is_whole =
          rows.are_adjacent(slot, kCopyRows) && seen.hold_all(first + row, first + row + kCopyRows);
      if (is_whole)
        load_adjacent(target + row * Stage::kRowBytes, cache + rows.offset(slot), kCopyRows);
      else
        load_scattered(rows, seen, first + row, slot, target + row * Stage::kRowBytes);
    }
  }

  // kCopyRows rows, wherever each lies: lanes find a row each, as finding one may take a division.
  __device__ __forceinline__ void load_scattered(const KeyRows& rows, const SeenPositions& seen,
                                                 int32_t first, int32_t slot, uint32_t target) const {
    const int own = lane % kCopyRows;
    const int64_t own_offset = seen.holds(first + own) ? rows.offset(slot + own) : -1;
#pragma unroll 4
    for (int n = lane; n < kCopyRows * kChunks; n += 32) {
      const int row = n / kChunks, piece = n % kChunks;
      const int64_t offset = __shfl_sync(~0u, own_offset, row);
      const bool valid = offset >= 0 && piece * kPiece < params.cache.head_size;
      copy_async_16(target + Stage::place(row, piece), cache + (valid ? offset + piece * kPiece : 0), valid);
    }
  }

  // The scales of its part's rows; those of rows that nobody sees become zeros.
  __device__ __forceinline__ void load_scales(const DecodeCursor& cursor, uint32_t target) const {
    const DecodeEntry& entry = cursor.of;
    const KeyRows rows(params.cache, entry.sequence, entry.kv_head);
    const SeenPositions seen = entry.seen();
    const int32_t first = cursor.key_tile() * shape.tile_keys + first_row();
    const int32_t slot = rows.first_slot(first);
    target += first_row() * kScale;
    for (int row = 4 * lane; row < part_keys(); row += 4 * 32) {
      const bool is_whole = seen.hold_all(first + row, first + row + 4) && rows.are_adjacent(slot + row, 4);
      const float* source = scales + (is_whole ? rows.number(slot + row) : 0);
      if (is_whole && reinterpret_cast<uintptr_t>(source) % 16 == 0) {
        copy_async_16(target + row * kScale, source, true);
        continue;
      }
#pragma unroll 1
      for (int one = row; one < row + 4; ++one) {
        const bool valid = seen.holds(first + one);
        copy_async_4(target + one * kScale, scales + (valid ? rows.number(slot + one) : 0), valid);
      }
    }
  }

  // Adjacent rows of a paged tile whose copies lie in one page each. Lanes look up a page each.
  __device__ __forceinline__ void load_pages(const KeyRows& rows, int32_t slot, int num_rows,
                                             uint32_t target) const {
    const auto page_slots = static_cast<int32_t>(params.cache.page_slots);
    const int32_t first_page = slot / page_slots;
    const int32_t last_page = (slot + num_rows - 1) / page_slots;
    const int32_t page = first_page + lane <= last_page ? rows.pages[first_page + lane] : 0;
    const auto head_size = static_cast<int>(params.cache.head_size);
    const int64_t page_size = params.cache.num_kv_heads * page_slots * head_size;
    int32_t page_row = slot - first_page * page_slots;
    int number = 0;
    for (int row = 0; row < num_rows; row += kCopyRows) {
      const int64_t offset =
          __shfl_sync(~0u, page, number) * page_size + rows.head_offset + page_row * head_size;
      load_adjacent(target + row * Stage::kRowBytes, cache + offset, kCopyRows);
      page_row += kCopyRows;
      if (page_row < page_slots) continue;
      page_row = 0;
      ++number;
    }
  }
};

}  // namespace ortolan::cuda
