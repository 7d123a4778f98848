// LowBitLinear on the CPU. A task is a block of rows of the weight, which it unpacks to float32 once for all
// tokens. A product has one order of sums, whatever the other tokens.
#pragma once

#include "experts_impl.h"

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
void unpack_rows(const LowBitWeight& w, int64_t first, int64_t count, float* target) {
  const int64_t bits = code_bits(kFormat), groups = w.groups();
  for (int64_t row = first; row < first + count; ++row)
    for (int64_t g = 0; g < groups; ++g, target += w.group_size) {
      const int64_t place = row * w.columns + g * w.group_size;
      unpack_group<kFormat>(w.codes + place * bits / 8, w.group_size, group_scale<Element>(w, row, g),
                            target);
    }
}

template <typename Element>
void unpack_rows(const LowBitWeight& w, int64_t first, int64_t count, float* target) {
  switch (w.format) {
    case LowBitFormat::kInt4:
      return unpack_rows<Element, LowBitFormat::kInt4>(w, first, count, target);
    case LowBitFormat::kInt8:
      return unpack_rows<Element, LowBitFormat::kInt8>(w, first, count, target);
    case LowBitFormat::kFp8:
      return unpack_rows<Element, LowBitFormat::kFp8>(w, first, count, target);
    case LowBitFormat::kMxfp4:
      return unpack_rows<Element, LowBitFormat::kMxfp4>(w, first, count, target);
    case LowBitFormat::kNvfp4:
      return unpack_rows<Element, LowBitFormat::kNvfp4>(w, first, count, target);
  }
}

template <typename Element>
class LowBitLayer {
 public:
  explicit LowBitLayer(const LowBitLinearParams& p)
      : p_(p), inputs_(p.num_tokens), x_(new float[p.num_tokens * p.num_inputs]) {}

  void run(ParallelFor& parallel) {
    parallel.each(p_.num_tokens, [&](int64_t token) { prepare(token); });
    const int64_t tasks = (p_.num_outputs + kUnpackedRows - 1) / kUnpackedRows;
    parallel.each(tasks, [&](int64_t task) { multiply(task * kUnpackedRows); });
  }

 private:
  static float element_at(const void* values, int64_t index) {
    return values ? to_float(static_cast<const Element*>(values)[index]) : 0.0f;
  }

  // A row of inputs in float32, normalised and rounded where there is a norm.
  void prepare(int64_t token) {
    const int64_t size = p_.num_inputs;
    float* row = x_.get() + token * size;
    double squares = 0;
    for (int64_t i = 0; i < size; ++i) {
      row[i] = element_at(p_.input, token * size + i);
      squares += static_cast<double>(row[i]) * row[i];
    }
    inputs_.rows[token] = row;
    if (!p_.norm_weight) return;
    const float factor = static_cast<float>(1.0 / std::sqrt(squares / size + p_.epsilon));
    for (int64_t i = 0; i < size; ++i) {
      Element rounded;
      from_float(row[i] * factor * element_at(p_.norm_weight, i), rounded);
      row[i] = to_float(rounded);
    }
  }

  void multiply(int64_t first) {
    const int64_t count = std::min(kUnpackedRows, p_.num_outputs - first);
    std::unique_ptr<float[]> rows(new float[count * p_.num_inputs]);
    if (p_.activation == GatedActivation::kNone) {
      products(first, count, rows.get(), [&](int64_t t, int64_t row, float sum) { put(t, row, sum); });
      return;
    }
    std::unique_ptr<float[]> gates(new float[p_.num_tokens * count]);
    products(first, count, rows.get(),
             [&](int64_t t, int64_t row, float sum) { gates[t * count + row - first] = sum; });
    products(p_.num_outputs + first, count, rows.get(), [&](int64_t t, int64_t row, float sum) {
      const int64_t place = row - p_.num_outputs;
      put(t, place, plain_gate(p_.activation, gates[t * count + place - first], sum));
    });
  }

  // Gives take(token, row, sum) the products with rows first .. of the weight, their bias added.
  template <typename Take>
  void products(int64_t first, int64_t count, float* rows, Take take) {
    unpack_rows<Element>(p_.weight, first, count, rows);
    multiply_rows(rows, count, p_.num_inputs, inputs_, nullptr, [&](int64_t t, int64_t row, float sum) {
      take(t, first + row, sum + element_at(p_.bias, first + row));
    });
  }

  void put(int64_t token, int64_t row, float value) {
    const int64_t place = token * p_.num_outputs + row;
    value += element_at(p_.residual, place);
    if (p_.output_float32)
      static_cast<float*>(p_.output)[place] = value;
    else
      from_float(value, static_cast<Element*>(p_.output)[place]);
  }

  const LowBitLinearParams& p_;
  InputRows inputs_;
  const std::unique_ptr<float[]> x_;  // [T, K]
};

inline void low_bit_linear(const LowBitLinearParams& p, ParallelFor& parallel) {
  if (p.element == ElementType::kFloat32) return LowBitLayer<float>(p).run(parallel);
  LowBitLayer<Half>(p).run(parallel);
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
