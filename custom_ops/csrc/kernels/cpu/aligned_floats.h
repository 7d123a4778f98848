// Buffers of floats that begin at a line of the cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

namespace ortolan::cpu::ORTOLAN_ISA {

struct FreeAligned {
  void operator()(float* floats) const { ::operator delete[](floats, std::align_val_t{64}); }
};
using AlignedFloats = std::unique_ptr<float[], FreeAligned>;

inline AlignedFloats aligned_floats(int64_t count) {
  return AlignedFloats(static_cast<float*>(
      ::operator new[](std::max<int64_t>(count, 1) * sizeof(float), std::align_val_t{64})));
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
