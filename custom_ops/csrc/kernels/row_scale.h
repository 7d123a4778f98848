// The scale of numbers that become codes: the same arithmetic on every device. Numbers times `inverse` are
// in units of codes; a unit stands for `value`.
#pragma once

#include "low_bit_rows.h"

namespace ortolan {

// Rounded to nearest, whatever the compiler may make of a division.
ORTOLAN_HOST_DEVICE float quotient(float dividend, float divisor) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(dividend, divisor);
#else
  return dividend / divisor;
#endif
}

// Of a row of a cache.
struct RowScale {
  ElementType type;
  float inverse;
  float value;  // NaN shows that the row held one

  static ORTOLAN_HOST_DEVICE RowScale of(ElementType type, float largest, bool is_nan) {
    const float limit = largest_code(type);
    return {type, largest == 0 ? 0.0f : quotient(limit, largest), is_nan ? NAN : quotient(largest, limit)};
  }
  ORTOLAN_HOST_DEVICE uint8_t code(float x) const { return code_of(type, x * inverse); }
};

// Of a group of inputs (InputFormat::kFp8).
struct Fp8Scale {
  float inverse;
  float value;

  // `given`: the scale of all groups; 0: each has its own.
  static ORTOLAN_HOST_DEVICE Fp8Scale of(float largest, float given) {
    if (given > 0) return {quotient(1, given), given};
    const float limit = largest_code(ElementType::kFloat8E4M3);
    return {largest > 0 ? quotient(limit, largest) : 0.0f, quotient(largest, limit)};
  }
};

}  // namespace ortolan
