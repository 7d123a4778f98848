// Addresses of the cache rows of one (sequence, kv head), a tile of positions at a time.
#pragma once

#include <utility>

#include "kernels/cache_layout.h"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/softmax.cuh"
#include "kernels/params.h"

namespace ortolan::cuda {

// The slot rule of CacheLayout with its divisions hoisted out: one per tile, and in paged caches one per row.
struct KeyRows {
  const CacheLayout* cache;
  const int32_t* pages;  // of the sequence; null where it owns one page
  int64_t head_row;      // rows before the head's in a page (or in the whole cache without pages)
  int64_t head_offset;   // elements before them
  int32_t capacity;
  int32_t sink;

  __device__ __forceinline__ KeyRows(const CacheLayout& layout, int64_t sequence, int64_t head)
      : cache(&layout),
        pages(layout.block_table ? layout.block_table + sequence * layout.pages_per_sequence : nullptr),
        head_row(((pages ? 0 : sequence * layout.num_kv_heads) + head) * layout.page_slots),
        head_offset(head_row * layout.head_size),
        capacity(static_cast<int32_t>(layout.capacity)),
        sink(static_cast<int32_t>(layout.sink)) {}

  // Slot of a tile's first position; rows after it follow, up to the wrap.
  __device__ __forceinline__ int32_t first_slot(int32_t position) const {
    return position < capacity ? position : wrapped(position);
  }
  // A function of its own, so that a cache that never wraps never divides.
  __device__ __noinline__ int32_t wrapped(int32_t position) const {
    return sink + (position - sink) % (capacity - sink);
  }

  // Slot of the row so many behind the one at `slot`.
  __device__ __forceinline__ int32_t slot_behind(int32_t slot, int32_t num_rows) const {
    return slot + num_rows < capacity ? slot + num_rows : wrapped(slot + num_rows);
  }

  // Element offset of the row at `slot`, which may lie past the end of the ring by less than a tile.
  __device__ __forceinline__ int64_t offset(int32_t slot) const {
    if (slot >= capacity) slot = wrapped(slot);
    if (!pages) return head_offset + static_cast<int64_t>(slot) * cache->head_size;
    const int32_t page_slots = static_cast<int32_t>(cache->page_slots);
    const int32_t page = slot / page_slots;
    const int64_t page_offset = pages[page] * cache->num_kv_heads * cache->page_slots * cache->head_size;
    return page_offset + head_offset + static_cast<int64_t>(slot - page * page_slots) * cache->head_size;
  }

  // Number of that row in the pool, by which its scale is found.
  __device__ __forceinline__ int64_t number(int32_t slot) const {
    if (slot >= capacity) slot = wrapped(slot);
    const int32_t page = pages ? slot / static_cast<int32_t>(cache->page_slots) : 0;
    const int64_t first = pages ? pages[page] * cache->num_kv_heads * cache->page_slots : 0;
    return first + head_row + slot - page * static_cast<int64_t>(cache->page_slots);
  }

  // Whether the rows from `slot` on lie one after another.
  __device__ __forceinline__ bool are_adjacent(int32_t slot, int32_t num_rows) const {
    if (slot + num_rows > capacity) return false;
    if (!pages) return true;
    const int32_t page_slots = static_cast<int32_t>(cache->page_slots);
    return slot % page_slots + num_rows <= page_slots;
  }
};

// A tile of kKeys positions, ready to be copied by kThreads threads to shared memory with rows `kStride`
// elements apart. Rows that nobody sees, and columns past the head size, become zeros.
template <int kHeadSize, int kKeys, int kStride, int kThreads>
struct KeyTileCopy {
  static constexpr int kChunks = kHeadSize / 8;  // 16-byte pieces of a row
  // A thread's pieces lie at constant distances.
  static constexpr bool kIsRegular =
      (kThreads % kChunks == 0 || kChunks % kThreads == 0) && kKeys * kChunks % kThreads == 0;

  const KeyRows& rows;
  const SeenPositions& seen;
  int32_t first;
  int32_t slot;
  bool is_plain;   // all rows seen, adjacent, and of the kernel's own head size
  int64_t offset;  // where plain

  __device__ __forceinline__ KeyTileCopy(const KeyRows& rows, const SeenPositions& seen, int32_t first)
      : rows(rows), seen(seen), first(first), slot(rows.first_slot(first)) {
    is_plain = rows.cache->head_size == kHeadSize && seen.hold_all(first, first + kKeys) &&
               rows.are_adjacent(slot, kKeys);
    offset = is_plain ? rows.offset(slot) : 0;
  }

  template <typename Element>
  __device__ __forceinline__ void start(Element* target, const void* cache, int thread) const {
    const auto* source = static_cast<const Element*>(cache);
    if (is_plain && kIsRegular) {
      const uint32_t first_target =
          shared_address(target + thread / kChunks * kStride + thread % kChunks * 8);
      start_numbers(first_target, source + offset + thread * 8,
                    std::make_integer_sequence<int, kKeys * kChunks / kThreads>{});
      return;
    }
    if (is_plain) {
      source += offset;
#pragma unroll
      for (int i = 0; i < kKeys * kChunks; i += kThreads) {
        const int n = i + thread;
        if (kKeys * kChunks % kThreads && n >= kKeys * kChunks) break;
        copy_async_16(target + n / kChunks * kStride + n % kChunks * 8, source + n * 8, true);
      }
      return;
    }
#pragma unroll 1
    for (int i = thread; i < kKeys * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const bool valid = seen.holds(first + row) && chunk * 8 < rows.cache->head_size;
      copy_async_16(target + row * kStride + chunk * 8,
                    source + (valid ? rows.offset(slot + row) + chunk * 8 : 0), valid);
    }
  }

 private:
  // `target` and `source`: the thread's first pieces.
  template <int... kNumbers>
  static __device__ __forceinline__ void start_numbers(uint32_t target, const void* source,
                                                       std::integer_sequence<int, kNumbers...>) {
    (copy_async_16_at<(kNumbers * kThreads / kChunks * kStride + kNumbers * kThreads % kChunks * 8) * 2,
                      kNumbers * kThreads * 16>(target, source),
     ...);
  }
};

}  // namespace ortolan::cuda
