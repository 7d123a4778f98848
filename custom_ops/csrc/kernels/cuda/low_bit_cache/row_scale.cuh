// The scale of a row that becomes codes: the same arithmetic wherever rows are appended.
#pragma once

#include "kernels/low_bit_rows.h"

namespace ortolan::cuda {

struct RowScale {
  ElementType type;
  float inverse;
  float value;  // NaN shows that the row held one

  static __device__ __forceinline__ RowScale of(ElementType type, float largest, bool is_nan) {
    const float limit = largest_code(type);
    return {type, largest == 0 ? 0.0f : __fdiv_rn(limit, largest), is_nan ? NAN : __fdiv_rn(largest, limit)};
  }
  __device__ __forceinline__ uint8_t code(float x) const { return code_of(type, __fmul_rn(x, inverse)); }
};

}  // namespace ortolan::cuda
