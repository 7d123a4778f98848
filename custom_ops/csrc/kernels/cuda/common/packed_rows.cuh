// Where the rows of packed tokens belong: the sequence of a row, and its place in a cache.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace ortolan::cuda {

// The sequence that owns a packed row, or -1. A decode step has one row per sequence and one prompt has one
// sequence: both are found by the first guess.
__device__ __forceinline__ int64_t sequence_of(const Packing& packing, int64_t row) {
  const int64_t sequences = packing.num_sequences;
  const int64_t guess = row < sequences ? row : sequences - 1;
  if (packing.first(guess) <= row && row < packing.first(guess + 1)) return guess;
  int64_t low = 0, high = sequences;  // first(low) <= row < first(high), if any sequence owns the row
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (packing.first(middle) <= row ? low : high) = middle;
  }
  return packing.first(low) <= row && row < packing.first(high) ? low : -1;
}

// Number of the cache row [D] to which a packed row's key and value of a kv head are appended, or -1 where
// they are not: of the rows of a chunk that share a slot only the last is, so no two writers meet. Rows
// outside the packing, negative positions and pages outside the pool are not appended either.
__device__ __forceinline__ int64_t append_row(const CacheLayout& cache, const Packing& packing,
                                              const Lengths& past_len, int64_t row, int64_t head) {
  const int64_t sequence = sequence_of(packing, row);
  if (sequence < 0) return -1;
  const int64_t token = row - packing.first(sequence);
  const int64_t position = past_len.at(sequence, head) + token;
  const int64_t ring = cache.capacity - cache.sink;
  const bool overtaken = position >= cache.sink && token + ring < packing.count(sequence);
  if (position < 0 || overtaken) return -1;
  const int64_t slot = cache.slot(position);
  const int64_t page = cache.page(sequence, slot);
  if (page < 0 || page >= cache.num_pages) return -1;
  return cache.row_index(sequence, head, slot);
}

// Element offset of that row, or -1.
__device__ __forceinline__ int64_t append_offset(const CacheLayout& cache, const Packing& packing,
                                                 const Lengths& past_len, int64_t row, int64_t head) {
  const int64_t number = append_row(cache, packing, past_len, row, head);
  return number < 0 ? -1 : number * cache.head_size;
}

}  // namespace ortolan::cuda
