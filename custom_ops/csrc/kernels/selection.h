// What KvSelect ranks positions by, on every device.
#pragma once

#include <cstdint>
#include <cstring>

#include "params.h"

namespace ortolan {

constexpr uint32_t kNeverKept = 0;
constexpr uint32_t kAlwaysKept = ~0u;

// One list: the positions it chooses from, and which of them are kept whatever they score.
struct Selection {
  const float* score;  // [C]
  int64_t length;
  int64_t sink;
  int64_t window_start;

  static ORTOLAN_HOST_DEVICE Selection of(const KvSelectParams& p, int64_t list) {
    const int64_t sequence = list / p.num_lists, head = list % p.num_lists;
    const int32_t* lengths = p.kv_len + sequence * p.num_kv_heads;
    int64_t length = lengths[head];
    if (p.num_lists == 1)
      for (int64_t h = 1; h < p.num_kv_heads; ++h) length = lengths[h] < length ? lengths[h] : length;
    length = length < 0 ? 0 : length < p.capacity ? length : p.capacity;
    return {p.score + list * p.capacity, length, p.sink, length - p.window};
  }

  // Rises with the score: the bits of floats that are not negative do. 0: the position is never kept.
  ORTOLAN_HOST_DEVICE uint32_t rank(int64_t position) const {
    const float value = position < length ? score[position] : -1.0f;
    if (position < length && (position < sink || position >= window_start)) return kAlwaysKept;
    if (!(value >= 0)) return kNeverKept;
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (bits & 0x7fffffffu) + 1;  // -0 is 0
  }
};

}  // namespace ortolan
