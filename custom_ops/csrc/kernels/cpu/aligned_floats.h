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

// The same, on the stack where they are few: tasks of a decode step are short.
class FewFloats {
 public:
  explicit FewFloats(int64_t count)
      : many_(count > kFew ? aligned_floats(count) : nullptr), floats_(count > kFew ? many_.get() : few_) {}
  float* get() const { return floats_; }

 private:
  static constexpr int64_t kFew = 2048;

  alignas(64) float few_[kFew];
  const AlignedFloats many_;
  float* const floats_;
};

}  // namespace ortolan::cpu::ORTOLAN_ISA
