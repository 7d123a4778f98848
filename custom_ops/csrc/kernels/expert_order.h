// What MoeGate ranks experts by, on every device.
#pragma once

#include <cstdint>
#include <cstring>

#include "cache_layout.h"

namespace ortolan {

// Rises with the value and, among equal values, falls with the expert: the largest of all comes first. NaN
// ranks with -inf. Different experts have different ranks, and no rank is 0.
ORTOLAN_HOST_DEVICE uint64_t expert_rank(float value, int64_t expert) {
  const float ordered = value == value ? value + 0.0f : -__builtin_inff();  // -0 is 0
  uint32_t bits;
  memcpy(&bits, &ordered, sizeof(bits));
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(expert));
}
ORTOLAN_HOST_DEVICE int64_t ranked_expert(uint64_t rank) { return 0xffffffffu - static_cast<uint32_t>(rank); }

}  // namespace ortolan
