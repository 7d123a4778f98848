// The rows that KvCompact moves within the cache of one sequence and kv head.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace ortolan::cuda {

struct CompactRows {
  const CacheLayout& cache;
  const int32_t* keep;  // [K] of this head
  int64_t count;        // K
  int64_t sequence;
  int64_t head;
  int64_t first_row;  // of the head's rows in the pool, where it has no pages

  __device__ CompactRows(const KvCompactParams& p, int64_t sequence, int64_t head)
      : cache(p.cache),
        keep(p.keep + (sequence * p.keep_heads + (p.keep_heads == 1 ? 0 : head)) * p.keep_count),
        count(p.keep_count),
        sequence(sequence),
        head(head),
        first_row((sequence * p.cache.num_kv_heads + head) * p.cache.page_slots) {}

  // The slot whose row becomes row k; negative at and past the end of the list.
  __device__ __forceinline__ int32_t kept(int64_t k) const { return k < count ? keep[k] : -1; }

  // The row [D] of the pool that holds a slot, or -1 where there is none.
  __device__ __forceinline__ int64_t row(int64_t slot) const {
    if (slot < 0 || slot >= cache.capacity) return -1;
    if (!cache.block_table) return sequence < cache.num_pages ? first_row + slot : -1;
    const auto in_sequence = static_cast<uint32_t>(slot), slots = static_cast<uint32_t>(cache.page_slots);
    const int64_t page = cache.block_table[sequence * cache.pages_per_sequence + in_sequence / slots];
    if (page < 0 || page >= cache.num_pages) return -1;
    return (page * cache.num_kv_heads + head) * cache.page_slots + in_sequence % slots;
  }
};

}  // namespace ortolan::cuda
