// Products with rows of a weight of few bits on the CPU. Codes of int4 multiply rounded inputs where their
// groups allow it. Other codes multiply floats: with few inputs, codes are multiplied as they are read; for
// more, rows are unpacked to float32 once. Both sum in one order, so that an input's products do not depend
// on the other inputs.
//
// A byte of two codes gives its low one by a table lookup and its high one by another, so where groups are of
// whole blocks of 32 columns, inputs lie as codes do: of each block, the even columns before the odd ones.
#pragma once

#include "integer_rows.h"

namespace ortolan::cpu::ORTOLAN_ISA {

constexpr int64_t kUnpackedRows = 8;
constexpr int64_t kPairedColumns = 2 * kLanes;

// Whether floats lie in the order of codes.
inline bool is_paired(const LowBitWeight& w) {
  return !takes_rounded(w) && code_bits(w.format) == 4 && w.group_size % kPairedColumns == 0;
}

// Where an input's value of a column lies.
inline int64_t input_place(const LowBitWeight& w, int64_t column) {
  if (!is_paired(w)) return column;
  const int64_t within = column % kPairedColumns;
  return column - within + within % 2 * kLanes + within / 2;
}

// Puts `count` values of an input into their places.
inline void place_input(const LowBitWeight& w, const float* source, int64_t count, float* target) {
  if (!is_paired(w)) {
    std::memcpy(target, source, count * sizeof(float));
    return;
  }
  for (int64_t block = 0; block < count; block += kPairedColumns)
    for (int64_t i = 0; i < kLanes; ++i) {
      target[block + i] = source[block + 2 * i];
      target[block + kLanes + i] = source[block + 2 * i + 1];
    }
}

template <typename Element, LowBitFormat kFormat>
class CodeRows {
 public:
  explicit CodeRows(const LowBitWeight& weight) : w_(weight), paired_(is_paired(weight)) {}

  template <typename Store>
  void multiply(int64_t first, int64_t count, const InputRows& inputs, Store store) const {
    if (inputs.count <= kDotTokens && w_.group_size % kLanes == 0)
      return multiply_few<kDotTokens>(first, count, inputs, store);
    std::unique_ptr<float[]> rows(new float[std::min(count, kUnpackedRows) * w_.columns]);
    for (int64_t begin = 0; begin < count; begin += kUnpackedRows) {
      const int64_t block = std::min(kUnpackedRows, count - begin);
      for (int64_t row = 0; row < block; ++row) unpack(first + begin + row, rows.get() + row * w_.columns);
      multiply_rows(rows.get(), block, w_.columns, inputs, nullptr,
                    [&](int64_t i, int64_t row, float sum) { store(i, begin + row, sum); });
    }
  }

 private:
  static constexpr int64_t kBits = code_bits(kFormat);
  static constexpr bool kTable = kBits == 4;

  const uint8_t* codes_of(int64_t row) const { return w_.codes + row * (w_.columns * kBits / 8); }
  static constexpr int64_t bytes(int64_t columns) { return columns * kBits / 8; }

  template <int64_t kTokens, int64_t kRows>
  using LaneSums = Register[kTokens][kRows][kVecRegisters];

  static void add_products(Register (&sums)[kVecRegisters], Vec weights, const float* input) {
    Register parts[kVecRegisters];
    as_registers(weights, parts);
    for (int64_t v = 0; v < kVecRegisters; ++v)
      sums[v] = sums[v] + parts[v] * load_register(input + v * kRegisterLanes);
  }

  // Sixteen weights in their order.
  static Vec weights_at(const uint8_t* codes, GroupScale by) {
    if constexpr (kTable)
      return lookup(group_table<kFormat>(by), widen_bytes(load_nibbles(codes)));
    else
      return decode_bytes<kFormat>(load_bytes(codes), by);
  }

  void unpack(int64_t row, float* target) const {
    const uint8_t* codes = codes_of(row);
    for (int64_t g = 0; g < w_.groups(); ++g, codes += bytes(w_.group_size), target += w_.group_size) {
      const GroupScale by = group_scale<Element, kFormat>(w_, row, g);
      if (kTable && paired_)
        unpack_pairs(codes, by, target);
      else
        unpack_group(codes, by, target);
    }
  }

  void unpack_pairs(const uint8_t* codes, GroupScale by, float* target) const {
    const Vec table = group_table<kFormat>(by);
    for (int64_t i = 0; i < w_.group_size; i += kPairedColumns, codes += kLanes) {
      const IntVec pairs = widen_bytes(load_bytes(codes));
      store(target + i, lookup(table, pairs));
      store(target + i + kLanes, lookup(table, pairs >> 4));
    }
  }

  void unpack_group(const uint8_t* codes, GroupScale by, float* target) const {
    int64_t i = 0;
    for (; i + kLanes <= w_.group_size; i += kLanes) store(target + i, weights_at(codes + bytes(i), by));
    if (i == w_.group_size) return;
    uint8_t rest[kLanes] = {};
    std::memcpy(rest, codes + bytes(i), bytes(w_.group_size - i));
    const Vec last = weights_at(rest, by);
    std::memcpy(target + i, &last, (w_.group_size - i) * sizeof(float));
  }

  template <int64_t kTokens, typename Store>
  void multiply_few(int64_t first, int64_t count, const InputRows& inputs, Store store) const {
    if constexpr (kTokens > 1)
      if (inputs.count < kTokens) return multiply_few<kTokens - 1>(first, count, inputs, store);
    int64_t row = 0;
    for (; row + kDotRows <= count; row += kDotRows)
      multiply_block<kDotRows, kTokens>(first, row, inputs, store);
    for (; row < count; ++row) multiply_block<1, kTokens>(first, row, inputs, store);
  }

  template <int64_t kRows, int64_t kTokens, typename Store>
  void multiply_block(int64_t first, int64_t row, const InputRows& inputs, Store store) const {
    LaneSums<kTokens, kRows> sums = {};
    const uint8_t* codes[kRows];
    for (int64_t r = 0; r < kRows; ++r) codes[r] = codes_of(first + row + r);
    for (int64_t g = 0; g < w_.groups(); ++g) {
      GroupScale by[kRows];
      for (int64_t r = 0; r < kRows; ++r) by[r] = group_scale<Element, kFormat>(w_, first + row + r, g);
      if (kTable && paired_)
        add_pairs<kRows, kTokens>(codes, by, inputs, g * w_.group_size, sums);
      else
        add_group<kRows, kTokens>(codes, by, inputs, g * w_.group_size, sums);
    }
    for (int64_t t = 0; t < kTokens; ++t)
      for (int64_t r = 0; r < kRows; ++r) store(t, row + r, horizontal_sum(as_vec(sums[t][r])));
  }

  // Adds the products of a group, which begins at column `begin`, and moves the codes past it.
  template <int64_t kRows, int64_t kTokens>
  void add_pairs(const uint8_t* (&codes)[kRows], const GroupScale (&by)[kRows], const InputRows& inputs,
                 int64_t begin, LaneSums<kTokens, kRows>& sums) const {
    Vec tables[kRows];
    for (int64_t r = 0; r < kRows; ++r) tables[r] = group_table<kFormat>(by[r]);
    for (int64_t i = begin; i < begin + w_.group_size; i += kPairedColumns)
      for (int64_t r = 0; r < kRows; ++r) {
        const IntVec pairs = widen_bytes(load_bytes(codes[r]));
        const Vec even = lookup(tables[r], pairs), odd = lookup(tables[r], pairs >> 4);
        for (int64_t t = 0; t < kTokens; ++t) {
          add_products(sums[t][r], even, inputs.rows[t] + i);
          add_products(sums[t][r], odd, inputs.rows[t] + i + kLanes);
        }
        codes[r] += kLanes;
      }
  }

  template <int64_t kRows, int64_t kTokens>
  void add_group(const uint8_t* (&codes)[kRows], const GroupScale (&by)[kRows], const InputRows& inputs,
                 int64_t begin, LaneSums<kTokens, kRows>& sums) const {
    for (int64_t i = begin; i < begin + w_.group_size; i += kLanes)
      for (int64_t r = 0; r < kRows; ++r) {
        const Vec weights = weights_at(codes[r], by[r]);
        for (int64_t t = 0; t < kTokens; ++t) add_products(sums[t][r], weights, inputs.rows[t] + i);
        codes[r] += bytes(kLanes);
      }
  }

  const LowBitWeight& w_;
  const bool paired_;
};

// Gives store(input, row, product) the products of rows first .. of a weight with all inputs: rounded ones
// where it takes them, else floats that lie where `input_place` says.
template <typename Element, typename Store>
void multiply_codes(const LowBitWeight& w, int64_t first, int64_t count, const InputRows& inputs,
                    Store store) {
  if (takes_rounded(w)) return IntegerRows<Element>(w).multiply(first, count, inputs, store);
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
