// Writes one row of keys or values as codes, on the CPU.
#pragma once

#include <cmath>

#include "element.h"
#include "kernels/params.h"
#include "kernels/row_scale.h"

namespace ortolan::cpu::ORTOLAN_ISA {

template <typename Element>
void append_codes(const Element* values, int64_t size, ElementType type, uint8_t* codes, float* scale) {
  float largest = 0;
  bool is_nan = false;
  for (int64_t d = 0; d < size; ++d) {
    const float magnitude = std::fabs(to_float(values[d]));
    is_nan = is_nan || magnitude != magnitude;
    largest = std::fmax(largest, magnitude);
  }
  const RowScale found = RowScale::of(type, largest, is_nan);
  *scale = found.value;
  for (int64_t d = 0; d < size; ++d) codes[d] = found.code(to_float(values[d]));
}

// `source` is a row [D] of compute elements; `row` is its number in the pool.
inline void append_codes(const RingKvAppendParams& p, const void* source, int64_t row, void* pool,
                         float* scales) {
  const int64_t size = p.cache.head_size;
  uint8_t* codes = static_cast<uint8_t*>(pool) + row * size;
  if (p.element == ElementType::kFloat32)
    return append_codes(static_cast<const float*>(source), size, p.cache_element, codes, scales + row);
  append_codes(static_cast<const Half*>(source), size, p.cache_element, codes, scales + row);
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
