// From codes of few bits to values: pairs of 16-bit elements for tensor cores, and single float32 values.
//
// All of it is exact. Integers: the bits of a code in the mantissa of a power of two, minus that power and
// the zero point. Small floats: exponent and mantissa moved to their places in the wider type, times the
// power of two between the two biases, which also makes normal numbers of subnormal ones.
#pragma once

#include "kernels/cuda/common/elements.cuh"
#include "kernels/low_bit_params.h"

namespace ortolan::cuda {

// What differs between the 16-bit types.
template <typename Element>
struct Places;
template <>
struct Places<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static constexpr int kMantissa = 7;                   // bits
  static constexpr uint32_t kNibbleBase = 0x43004300u;  // 128, twice
  static constexpr uint32_t kE4m3Factor = 0x7B807B80u;  // 2^120
  static constexpr uint32_t kE2m1Factor = 0x7E807E80u;  // 2^126
};
template <>
struct Places<__half> {
  using Pair = __half2;
  static constexpr int kMantissa = 10;
  static constexpr uint32_t kNibbleBase = 0x64006400u;  // 1024
  static constexpr uint32_t kE4m3Factor = 0x5C005C00u;  // 2^8
  static constexpr uint32_t kE2m1Factor = 0x74007400u;  // 2^14
};

template <typename Element>
__device__ __forceinline__ typename Places<Element>::Pair as_pair(uint32_t bits) {
  return reinterpret_cast<const typename Places<Element>::Pair&>(bits);
}
template <typename Pair>
__device__ __forceinline__ uint32_t bits_of(Pair pair) {
  return reinterpret_cast<const uint32_t&>(pair);
}
template <typename Element>
__device__ __forceinline__ uint32_t subtract_pairs(uint32_t a, uint32_t b) {
  return bits_of(__hsub2(as_pair<Element>(a), as_pair<Element>(b)));
}
template <typename Element>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  return bits_of(__hmul2(as_pair<Element>(a), as_pair<Element>(b)));
}

template <int kLeft>
__device__ __forceinline__ uint32_t shifted(uint32_t bits) {
  if constexpr (kLeft >= 0)
    return bits << kLeft;
  else
    return bits >> -kLeft;
}

// A pair of e4m3 codes at bit kFrom of each half.
template <typename Element, int kFrom>
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t word) {
  constexpr int kPlace = Places<Element>::kMantissa - 3;
  const uint32_t sign = shifted<8 - kFrom>(word) & 0x80008000u;
  const uint32_t rest = shifted<kPlace - kFrom>(word) & (0x007F007Fu << kPlace);
  return multiply_pairs<Element>(sign | rest, Places<Element>::kE4m3Factor);
}
// A pair of e2m1 codes at bit kFrom of each half.
template <typename Element, int kFrom>
__device__ __forceinline__ uint32_t e2m1_pair(uint32_t word) {
  constexpr int kPlace = Places<Element>::kMantissa - 1;
  const uint32_t sign = shifted<12 - kFrom>(word) & 0x80008000u;
  const uint32_t rest = shifted<kPlace - kFrom>(word) & (0x00070007u << kPlace);
  return multiply_pairs<Element>(sign | rest, Places<Element>::kE2m1Factor);
}

// word & kMask | base in one instruction, which has room for one constant.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t masked_onto(uint32_t word, uint32_t base) {
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n" : "=r"(bits) : "r"(word), "n"(kMask), "r"(base));
  return bits;
}

// Expands a word of codes: of 4 bits to the pairs (0, 4), (1, 5), (2, 6), (3, 7), of 8 bits to (0, 2), (1,
// 3). `offset` is what offset_of makes of a zero point, or of nvfp4's scale.
template <typename Element, LowBitFormat kFormat>
struct Codes {
  static constexpr int kBits = static_cast<int>(code_bits(kFormat));
  static constexpr int kPairs = 16 / kBits;
  static constexpr bool kInteger = kFormat == LowBitFormat::kInt4 || kFormat == LowBitFormat::kInt8;
  static constexpr bool kBytesByFloat = kFormat == LowBitFormat::kInt8 && Places<Element>::kMantissa < 10;

  static __device__ __forceinline__ uint32_t offset_of(uint32_t code) {
    if constexpr (kBytesByFloat) return __float_as_uint(8388608.0f + static_cast<float>(code));
    if constexpr (kInteger) return Places<Element>::kNibbleBase + code * 0x00010001u;
    return e4m3_pair<Element, 0>(code * 0x00010001u);
  }
  static __device__ __forceinline__ void expand(uint32_t word, uint32_t offset, uint32_t (&pairs)[kPairs]) {
    if constexpr (kFormat == LowBitFormat::kInt4) {
      uint32_t base = Places<Element>::kNibbleBase;
      asm("" : "+r"(base));  // in a register
#pragma unroll
      for (int n = 0; n < 4; ++n)
        pairs[n] = subtract_pairs<Element>(masked_onto<0x000F000Fu>(word >> 4 * n, base), offset);
    } else if constexpr (kBytesByFloat) {
      const auto value = [&](unsigned byte) {
        return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440u + byte)) - __uint_as_float(offset);
      };
      pairs[0] = Half<Element>::pack(value(0), value(2));
      pairs[1] = Half<Element>::pack(value(1), value(3));
    } else if constexpr (kFormat == LowBitFormat::kInt8) {
      pairs[0] = subtract_pairs<Element>(__byte_perm(word, 0x64646464u, 0x4240), offset);
      pairs[1] = subtract_pairs<Element>(__byte_perm(word, 0x64646464u, 0x4341), offset);
    } else if constexpr (kFormat == LowBitFormat::kFp8) {
      pairs[0] = e4m3_pair<Element, 0>(word);
      pairs[1] = e4m3_pair<Element, 8>(word);
    } else {
      pairs[0] = e2m1_pair<Element, 0>(word);
      pairs[1] = e2m1_pair<Element, 4>(word);
      pairs[2] = e2m1_pair<Element, 8>(word);
      pairs[3] = e2m1_pair<Element, 12>(word);
      if constexpr (kFormat == LowBitFormat::kNvfp4)
#pragma unroll
        for (uint32_t& pair : pairs) pair = multiply_pairs<Element>(pair, offset);
    }
  }
};

__device__ __forceinline__ float e4m3_value(uint32_t code) {
  return __uint_as_float((code & 0x80u) << 24 | (code & 0x7Fu) << 20) * 0x1p120f;
}
__device__ __forceinline__ float e2m1_value(uint32_t code) {
  return __uint_as_float((code & 8u) << 28 | (code & 7u) << 22) * 0x1p126f;
}
__device__ __forceinline__ float e8m0_value(uint32_t code) {
  return __uint_as_float(code ? code << 23 : 0x00400000u);
}

// A code of an integer format as a float, exactly, where a conversion would be slow.
__device__ __forceinline__ float integer_value(uint32_t code) {
  return __uint_as_float(0x4B000000u | code) - 8388608.0f;
}

// What turns the codes of a group into values: (code - zero) * scale.
struct GroupValues {
  LowBitFormat format;
  float scale, zero;

  // `groups`: of a row.
  template <typename Element>
  static __device__ __forceinline__ GroupValues of(const LowBitWeight& w, int64_t row, int groups, int group,
                                                   Element) {
    const int64_t place = row * groups + group;
    GroupValues values{w.format, 1.0f, 0.0f};
    switch (w.format) {
      case LowBitFormat::kInt4: {
        const int64_t byte = row * ((groups + 1) / 2) + group / 2;
        values.zero = w.zero_points ? integer_value(w.zero_points[byte] >> group % 2 * 4 & 15) : 8.0f;
        values.scale = to_float(static_cast<const Element*>(w.scales)[place]);
        break;
      }
      case LowBitFormat::kInt8:
        values.zero = w.zero_points ? integer_value(w.zero_points[place]) : 128.0f;
        values.scale = to_float(static_cast<const Element*>(w.scales)[place]);
        break;
      case LowBitFormat::kFp8:
        values.scale =
            w.float_scales[static_cast<int>(row) / static_cast<int>(w.scale_rows) * int64_t{groups} + group];
        break;
      case LowBitFormat::kMxfp4:
        values.scale = e8m0_value(w.scale_codes[place]);
        break;
      case LowBitFormat::kNvfp4:
        values.scale = e4m3_value(w.scale_codes[place]) * w.float_scales[row];
    }
    return values;
  }
  __device__ __forceinline__ float operator()(uint32_t code) const {
    if (format == LowBitFormat::kInt4 || format == LowBitFormat::kInt8)
      return (integer_value(code) - zero) * scale;
    return (format == LowBitFormat::kFp8 ? e4m3_value(code) : e2m1_value(code)) * scale;
  }
};

// The code of a column in its row.
__device__ __forceinline__ uint32_t code_at(const LowBitWeight& w, int64_t row, int64_t column) {
  const int64_t place = row * w.columns + column;
  return code_bits(w.format) == 8 ? w.codes[place] : w.codes[place / 2] >> place % 2 * 4 & 15u;
}

}  // namespace ortolan::cuda
