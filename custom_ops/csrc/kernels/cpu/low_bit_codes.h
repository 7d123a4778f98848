// Products with rows of a weight of few bits on the CPU. With one input, codes are multiplied as they are
// read; for several, rows are unpacked to float32 once. Both sum in one order, so that an input's products
// do not depend on the other inputs.
#pragma once

#include <cmath>

#include "experts_impl.h"
#include "kernels/low_bit_params.h"

namespace ortolan::cpu::ORTOLAN_ISA {

constexpr int64_t kUnpackedRows = 8;

typedef uint8_t CodeVec __attribute__((vector_size(16)));

// Sixteen codes of 4 or 8 bits.
inline IntVec load_codes4(const uint8_t* source) {
  CodeVec bytes{};
  std::memcpy(&bytes, source, 8);
  const CodeVec low = bytes & 15, high = bytes >> 4;
  return __builtin_convertvector(
      __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), IntVec);
}
inline IntVec load_codes8(const uint8_t* source) {
  CodeVec bytes;
  std::memcpy(&bytes, source, sizeof bytes);
  return __builtin_convertvector(bytes, IntVec);
}

inline Vec from_bits(IntVec bits) {
  Vec value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A small float's exponent and mantissa are shifted to a float's, and rebiased by a multiplication, which
// also normalises subnormal values.
inline Vec decode_e2m1(IntVec code) {
  const Vec magnitude = from_bits((code & 7) << 22) * 8.507059173023462e37f;  // 2^126
  return select((code & 8) != 0, -magnitude, magnitude);
}
inline Vec decode_e4m3(IntVec code) {
  const Vec magnitude = from_bits((code & 0x7f) << 20) * 1.329227995784916e36f;  // 2^120
  const Vec value = select((code & 0x80) != 0, -magnitude, magnitude);
  return select((code & 0x7f) == 0x7f, broadcast(__builtin_nanf("")), value);
}

inline float decode_e4m3(uint8_t code) { return decode_e4m3(IntVec{} + static_cast<int32_t>(code))[0]; }

// What a group's codes are multiplied by, and what is subtracted before.
struct GroupScale {
  float scale;
  float zero;
};

template <typename Element>
GroupScale group_scale(const LowBitWeight& w, int64_t row, int64_t group) {
  const int64_t groups = w.groups(), place = row * groups + group;
  switch (w.format) {
    case LowBitFormat::kInt4: {
      float zero = 8;
      if (w.zero_points) {
        const uint8_t pair = w.zero_points[row * ((groups + 1) / 2) + group / 2];
        zero = group % 2 ? pair >> 4 : pair & 15;
      }
      return {to_float(static_cast<const Element*>(w.scales)[place]), zero};
    }
    case LowBitFormat::kInt8:
      return {to_float(static_cast<const Element*>(w.scales)[place]),
              w.zero_points ? static_cast<float>(w.zero_points[place]) : 128.0f};
    case LowBitFormat::kFp8:
      return {w.float_scales[row / w.scale_rows * groups + group], 0};
    case LowBitFormat::kMxfp4:
      return {std::ldexp(1.0f, w.scale_codes[place] - 127), 0};
    case LowBitFormat::kNvfp4:
      return {decode_e4m3(w.scale_codes[place]) * w.float_scales[row], 0};
  }
  return {};
}

template <LowBitFormat kFormat>
Vec decode(const uint8_t* codes) {
  if constexpr (kFormat == LowBitFormat::kInt4) return __builtin_convertvector(load_codes4(codes), Vec);
  if constexpr (kFormat == LowBitFormat::kInt8) return __builtin_convertvector(load_codes8(codes), Vec);
  if constexpr (kFormat == LowBitFormat::kFp8) return decode_e4m3(load_codes8(codes));
  return decode_e2m1(load_codes4(codes));
}

template <LowBitFormat kFormat>
void unpack_group(const uint8_t* codes, int64_t size, GroupScale by, float* target) {
  constexpr int64_t kBits = code_bits(kFormat);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store(target + i, (decode<kFormat>(codes + i * kBits / 8) - by.zero) * by.scale);
  if (i == size) return;
  uint8_t rest[kLanes] = {};
  std::memcpy(rest, codes + i * kBits / 8, (size - i) * kBits / 8);
  const Vec last = (decode<kFormat>(rest) - by.zero) * by.scale;
  std::memcpy(target + i, &last, (size - i) * sizeof(float));
}

template <typename Element, LowBitFormat kFormat>
class CodeRows {
 public:
  explicit CodeRows(const LowBitWeight& weight) : w_(weight) {}

  template <typename Store>
  void multiply(int64_t first, int64_t count, const InputRows& inputs, Store store) const {
    if (inputs.count == 1 && w_.group_size % kLanes == 0) return multiply_one(first, count, inputs, store);
    std::unique_ptr<float[]> rows(new float[std::min(count, kUnpackedRows) * w_.columns]);
    for (int64_t begin = 0; begin < count; begin += kUnpackedRows) {
      const int64_t block = std::min(kUnpackedRows, count - begin);
      unpack(first + begin, block, rows.get());
      multiply_rows(rows.get(), block, w_.columns, inputs, nullptr,
                    [&](int64_t i, int64_t row, float sum) { store(i, begin + row, sum); });
    }
  }

 private:
  static constexpr int64_t kBits = code_bits(kFormat);

  const uint8_t* codes_of(int64_t row) const { return w_.codes + row * (w_.columns * kBits / 8); }

  void unpack(int64_t first, int64_t count, float* target) const {
    for (int64_t row = first; row < first + count; ++row)
      for (int64_t g = 0; g < w_.groups(); ++g, target += w_.group_size)
        unpack_group<kFormat>(codes_of(row) + g * w_.group_size * kBits / 8, w_.group_size,
                              group_scale<Element>(w_, row, g), target);
  }

  template <typename Store>
  void multiply_one(int64_t first, int64_t count, const InputRows& inputs, Store store) const {
    float products[kDotRows];
    int64_t row = 0;
    for (; row + kDotRows <= count; row += kDotRows) {
      dot<kDotRows>(first + row, inputs.rows[0], products);
      for (int64_t r = 0; r < kDotRows; ++r) store(0, row + r, products[r]);
    }
    for (; row < count; ++row) {
      dot<1>(first + row, inputs.rows[0], products);
      store(0, row, products[0]);
    }
  }

  template <int64_t kRows>
  void dot(int64_t first, const float* input, float* products) const {
    Vec sums[kRows] = {};
    const uint8_t* codes[kRows];
    for (int64_t r = 0; r < kRows; ++r) codes[r] = codes_of(first + r);
    for (int64_t g = 0; g < w_.groups(); ++g) {
      GroupScale by[kRows];
      for (int64_t r = 0; r < kRows; ++r) by[r] = group_scale<Element>(w_, first + r, g);
      for (int64_t i = 0; i < w_.group_size; i += kLanes, input += kLanes) {
        const Vec x = load(input);
        for (int64_t r = 0; r < kRows; ++r) {
          const Vec weight = (decode<kFormat>(codes[r]) - by[r].zero) * by[r].scale;
          sums[r] = sums[r] + weight * x;
          codes[r] += kLanes * kBits / 8;
        }
      }
    }
    for (int64_t r = 0; r < kRows; ++r) products[r] = horizontal_sum(sums[r]);
  }

  const LowBitWeight& w_;
};

// Gives store(input, row, product) the products of rows first .. of a weight with all inputs.
template <typename Element, typename Store>
void multiply_codes(const LowBitWeight& w, int64_t first, int64_t count, const InputRows& inputs,
                    Store store) {
  switch (w.format) {
    case LowBitFormat::kInt4:
      return CodeRows<Element, LowBitFormat::kInt4>(w).multiply(first, count, inputs, store);
    case LowBitFormat::kInt8:
      return CodeRows<Element, LowBitFormat::kInt8>(w).multiply(first, count, inputs, store);
    case LowBitFormat::kFp8:
      return CodeRows<Element, LowBitFormat::kFp8>(w).multiply(first, count, inputs, store);
    case LowBitFormat::kMxfp4:
      return CodeRows<Element, LowBitFormat::kMxfp4>(w).multiply(first, count, inputs, store);
    case LowBitFormat::kNvfp4:
      return CodeRows<Element, LowBitFormat::kNvfp4>(w).multiply(first, count, inputs, store);
  }
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
