// Where a cache position lives: the one place of the slot arithmetic (OPS contract, "Slot of position p").
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ORTOLAN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ORTOLAN_HOST_DEVICE inline
#endif

namespace ortolan {

// A pool of pages [N, Hkv, P, D] and the rule that maps (sequence, kv head, position) to a row of it.
struct CacheLayout {
  int64_t num_pages = 0;                 // N
  int64_t num_kv_heads = 0;              // Hkv
  int64_t page_slots = 0;                // P
  int64_t head_size = 0;                 // D
  int64_t pages_per_sequence = 1;        // M
  int64_t capacity = 0;                  // C, slots a sequence has
  int64_t sink = 0;                      // S
  const int32_t* block_table = nullptr;  // [B, M]; null: sequence b owns page b

  ORTOLAN_HOST_DEVICE int64_t slot(int64_t position) const {
    return position < capacity ? position : sink + (position - sink) % (capacity - sink);
  }

  ORTOLAN_HOST_DEVICE int64_t page(int64_t sequence, int64_t slot) const {
    return block_table ? block_table[sequence * pages_per_sequence + slot / page_slots] : sequence;
  }

  // Number of the row [D] of the pool that holds `slot` of (sequence, kv head); its scale has the same
  // number.
  ORTOLAN_HOST_DEVICE int64_t row_index(int64_t sequence, int64_t head, int64_t slot) const {
    const int64_t row = block_table ? slot % page_slots : slot;
    return (page(sequence, slot) * num_kv_heads + head) * page_slots + row;
  }

  // Element offset of that row.
  ORTOLAN_HOST_DEVICE int64_t row_offset(int64_t sequence, int64_t head, int64_t slot) const {
    return row_index(sequence, head, slot) * head_size;
  }
};

}  // namespace ortolan
