// Copies tiles of cached rows to shared memory as wgmma reads them, on sm_90a, and hands them over.
#pragma once

#include "kernels/cuda/attention/key_rows.cuh"
#include "wgmma.cuh"

namespace ortolan::cuda {

// A place in a ring of so many buffers.
template <int kStages>
struct Ring : RingPlace {
  __device__ __forceinline__ void advance() { RingPlace::advance(kStages); }
};

// Buffers that one warp fills and others read.
template <int kStages>
struct Handover {
  Barrier full[kStages], empty[kStages];

  // `readers`: warps.
  __device__ __forceinline__ void init(int readers) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(1);
      empty[stage].init(readers);
    }
  }
  // For the one who fills: the buffer may be overwritten.
  __device__ __forceinline__ void wait_empty(const Ring<kStages>& at) { empty[at.place].wait(at.parity ^ 1); }
  __device__ __forceinline__ void wait_full(const Ring<kStages>& at) { full[at.place].wait(at.parity); }
  // For whole warps that read.
  __device__ __forceinline__ void release(Ring<kStages>& at) {
    empty[at.place].arrive_once(threadIdx.x % 32);
    at.advance();
  }
};

// Tiles of kKeys positions and kColumns columns of one sequence and kv head. Tiles whose rows are adjacent
// (whole pages or parts of them) are copied by the tensor unit, `box_rows` rows at a time; the others - at
// the wrap of a ring, at the end of what is written, where rows may hold anything and become zeros - row by
// row. Columns past the head size become zeros.
template <typename Element, int kColumns, int kKeys>
struct Sm90TileCopy {
  static constexpr int kBoxes = (kColumns + 63) / 64;  // of 64 columns, 128 bytes
  static constexpr int kTileBytes = kKeys * kBoxes * 128;

  const CacheLayout& cache;
  int sequence;
  int kv_head;
  int32_t end;  // positions of the sequence
  int box_rows;
  int first_column = 0;

  // For a whole warp; `full` expects one arrival. `map` describes the cache at `source`.
  __device__ __forceinline__ void start(uint32_t target, const CUtensorMap& map, const void* source,
                                        int32_t first, Barrier& full) const {
    const int lane = threadIdx.x % 32;
    const KeyRows rows(cache, sequence, kv_head);
    const int copies = kKeys / box_rows;
    const int32_t slot = rows.first_slot(first + lane % copies * box_rows);
    if (!__all_sync(~0u, first + kKeys <= end && rows.are_adjacent(slot, box_rows))) {
      copy_rows(target, rows, static_cast<const Element*>(source), first, full);
      return;
    }
    if (lane == 0) full.arrive_expecting(kTileBytes);
    __syncwarp();
    if (lane >= copies) return;
    start_boxes(target + lane * box_rows * 128, map, rows, slot, full);
  }

  // The same for a tile that the end of the sequence cuts, where the rows before the end are adjacent;
  // returns false where they are not. Rows past the end hold anything.
  __device__ __forceinline__ bool start_cut(uint32_t target, const CUtensorMap& map, int32_t first,
                                            Barrier& full) const {
    const int lane = threadIdx.x % 32;
    const KeyRows rows(cache, sequence, kv_head);
    const int copies = (min(kKeys, end - first) + box_rows - 1) / box_rows;
    const int32_t position = first + lane % copies * box_rows;
    const int32_t slot = rows.first_slot(position);
    if (!__all_sync(~0u, rows.are_adjacent(slot, min(box_rows, end - position)))) return false;
    if (lane == 0) full.arrive_expecting(copies * box_rows * kBoxes * 128);
    __syncwarp();
    if (lane < copies) start_boxes(target + lane * box_rows * 128, map, rows, slot, full);
    return true;
  }
  // Makes rows past the end zeros, which have arrived.
  __device__ __forceinline__ void clear_past_end(uint32_t target, int32_t first) const {
    constexpr int kPieces = kColumns / 8;
    for (int i = (end - first) * kPieces + static_cast<int>(threadIdx.x) % 32; i < kKeys * kPieces; i += 32)
      store_shared_16(swizzled_place(target, kKeys, i / kPieces, i % kPieces), {});
    fence_async_shared();
    __syncwarp();
  }

 private:
  __device__ __forceinline__ void start_boxes(uint32_t target, const CUtensorMap& map, const KeyRows& rows,
                                              int32_t slot, Barrier& full) const {
    const auto plane = static_cast<int32_t>(cache.page(sequence, slot) * cache.num_kv_heads + kv_head);
    const int32_t row = rows.pages ? slot % static_cast<int32_t>(cache.page_slots) : slot;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      copy_box(target + box * kKeys * 128, map, first_column + box * 64, row, plane, full);
  }

  __device__ __forceinline__ void copy_rows(uint32_t target, const KeyRows& rows, const Element* source,
                                            int32_t first, Barrier& full) const {
    const int lane = threadIdx.x % 32;
    const int32_t first_slot = rows.first_slot(first);
    const int columns = static_cast<int>(cache.head_size) - first_column;
#pragma unroll 1
    for (int i = lane; i < kKeys * kColumns / 8; i += 32) {
      const int row = i / (kColumns / 8), column = i % (kColumns / 8) * 8;
      // Negative too where a row that nobody sees has no page.
      const int64_t offset = first + row < end ? rows.offset(first_slot + row) : -1;
      const bool exists = offset >= 0 && column < columns;
      copy_async_16(swizzled_place(target, kKeys, row, column / 8),
                    source + (exists ? offset + first_column + column : 0), exists);
    }
    copy_async_commit();
    copy_async_wait<0>();
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) full.arrive();
  }
};

// Rows that one tensor copy takes: whole tiles, or what divides pages and, if that is not too small, rings,
// so that no copy leaves a page or runs over a wrap. In pages of other sizes no tile is copied whole.
inline int copied_rows(const CacheLayout& cache, bool may_wrap, int tile_keys) {
  const bool is_paged = cache.block_table != nullptr;
  if (!is_paged && !may_wrap) return tile_keys;
  const int64_t slots = is_paged ? cache.page_slots : cache.capacity;
  const auto divides = [&](int rows) { return slots % rows == 0 && (is_paged || cache.sink % rows == 0); };
  if (divides(tile_keys)) return tile_keys;
  int rows = tile_keys & -tile_keys;  // the largest power of two in it
  while (rows > 8 && !divides(rows)) rows /= 2;
  return is_paged || rows > 8 ? rows : tile_keys;
}

}  // namespace ortolan::cuda
