// Conversion between stored elements and the float32 that arithmetic runs in.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace ortolan::cpu::ORTOLAN_ISA {

// An IEEE half, as its bits.
struct Half {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(Half h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t magnitude = h.bits & 0x7fffu;
  float value;
  if (magnitude >= 0x7c00u) {
    const uint32_t bits = sign | 0x7f800000u | (magnitude & 0x3ffu) << 13;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  // Exponents are rebiased by a multiplication, which also normalises subnormal halves.
  const uint32_t bits = magnitude << 13;
  std::memcpy(&value, &bits, sizeof value);
  value *= 5.192296858534828e33f;  // 2^112
  return sign ? -value : value;
}

inline void from_float(float x, float& target) { target = x; }

// Rounds to nearest, ties to even.
inline void from_float(float x, Half& target) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) {
    target.bits = static_cast<uint16_t>(sign | 0x7e00u);
  } else if (bits >= 0x477ff000u) {
    target.bits = static_cast<uint16_t>(sign | 0x7c00u);
  } else if (bits < 0x38800000u) {
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;  // aligns a subnormal half's last bit with the float's
    std::memcpy(&bits, &magnitude, sizeof bits);
    target.bits = static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  } else {
    const uint32_t odd = bits >> 13 & 1u;
    target.bits = static_cast<uint16_t>(sign | ((bits - 0x38000000u + 0xfffu + odd) >> 13));
  }
}

inline void load_row(const float* source, int64_t count, float* target) {
  std::memcpy(target, source, count * sizeof(float));
}

inline void load_row(const Half* source, int64_t count, float* target) {
#if defined(__F16C__)
  for (int64_t i = 0; i < count; i += 8) {
    __m128i halves;
    std::memcpy(&halves, source + i, sizeof halves);
    _mm256_storeu_ps(target + i, _mm256_cvtph_ps(halves));
  }
#else
  for (int64_t i = 0; i < count; ++i) target[i] = to_float(source[i]);
#endif
}

template <typename Element>
void store_row(const float* source, int64_t count, Element* target) {
  for (int64_t i = 0; i < count; ++i) from_float(source[i], target[i]);
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
