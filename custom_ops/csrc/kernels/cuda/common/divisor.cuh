// Division by a number that only the host knows.
#pragma once

#include "kernels/cache_layout.h"

namespace ortolan::cuda {

// Of numbers below 2^31.
// Source: Granlund and Montgomery, "Division by Invariant Integers using Multiplication" (1994).
struct Divisor {
  uint32_t magic;
  uint32_t shift;

  static Divisor of(uint32_t divisor) {
    uint32_t shift = 0;
    while ((uint64_t{1} << shift) < divisor) ++shift;
    const uint64_t excess = (uint64_t{1} << shift) - divisor;
    return {static_cast<uint32_t>((excess << 32) / divisor + 1), shift};
  }
  ORTOLAN_HOST_DEVICE int divide(int number) const {
    const auto n = static_cast<uint32_t>(number);
#ifdef __CUDA_ARCH__
    const uint32_t high = __umulhi(n, magic);
#else
    const auto high = static_cast<uint32_t>((uint64_t{n} * magic) >> 32);
#endif
    return static_cast<int>((high + n) >> shift);
  }
};

}  // namespace ortolan::cuda
