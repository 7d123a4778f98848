// Writes one row of keys or values as codes, on the CPU.
#pragma once

#include <cmath>

#include "element.h"
#include "kernels/low_bit_rows.h"
#include "kernels/params.h"

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
  const float limit = largest_code(type);
  const float inverse = largest == 0 ? 0.0f : limit / largest;
  *scale = is_nan ? NAN : largest / limit;
  for (int64_t d = 0; d < size; ++d) codes[d] = code_of(type, to_float(values[d]) * inverse);
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
