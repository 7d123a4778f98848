// Products of codes of int4 with rounded inputs. What a unit adds up is exact: whole numbers in lanes of 32
// bits. Lanes are scaled and added in float32, unit by unit, so a product has one order of sums whatever the
// other rows and inputs are.
#pragma once

#include "code_vectors.h"
#include "experts_impl.h"
#include "rounded_inputs.h"

namespace ortolan::cpu::ORTOLAN_ISA {

#if defined(__AVX512F__)
constexpr int64_t kIntegerRows = 4, kIntegerTokens = 2;
#else
constexpr int64_t kIntegerRows = 2, kIntegerTokens = 2;
#endif
constexpr int64_t kPrefetchBytes = 2048;  // ahead in a row of codes, and into the rows behind it

// 64 bytes of codes, parted for the products.
struct CodeUnit {
#if defined(__AVX512VNNI__)
  IntVec parts[kCodeParts];  // bytes

  explicit CodeUnit(IntVec codes) : parts{codes & 0x0f0f0f0f, (codes >> 4) & 0x0f0f0f0f} {}

  // Sums of code * q in each lane, less `offset`.
  IntVec dot(const RoundedUnit& unit, IntVec offset) const {
    const int8_t* bytes = reinterpret_cast<const int8_t*>(unit.numbers);
    __m512i high = _mm512_setzero_si512(), low = reinterpret_cast<__m512i>(-offset);
    for (int64_t part = 0; part < kCodeParts; ++part, bytes += 2 * kUnitBytes) {
      const __m512i codes = reinterpret_cast<__m512i>(parts[part]);
      high = _mm512_dpbusd_epi32(high, codes, _mm512_load_si512(bytes));
      low = _mm512_dpbusd_epi32(low, codes, _mm512_load_si512(bytes + kUnitBytes));
    }
    return (reinterpret_cast<IntVec>(high) << 8) + reinterpret_cast<IntVec>(low);
  }
#else
  IntVec parts[2 * kCodeParts];  // pairs of 16 bits: bytes 0 and 2 of each lane, then 1 and 3

  explicit CodeUnit(IntVec codes) {
    for (int part = 0; part < 2 * kCodeParts; ++part) parts[part] = (codes >> (part * 4)) & 0x000f000f;
  }

  IntVec dot(const RoundedUnit& unit, IntVec offset) const {
    IntVec sum = -offset;
    for (int64_t part = 0; part < 2 * kCodeParts; ++part)
      sum = sum + multiply_pairs(parts[part], unit.numbers + part * 2 * kLanes);
    return sum;
  }

 private:
  static IntVec multiply_pairs(IntVec codes, const int16_t* numbers) {
    IntVec sums;
#if defined(__AVX512BW__)
    sums = reinterpret_cast<IntVec>(
        _mm512_madd_epi16(reinterpret_cast<__m512i>(codes), _mm512_load_si512(numbers)));
#elif defined(__AVX2__)
    __m256i halves[2];
    std::memcpy(halves, &codes, sizeof codes);
    for (int i = 0; i < 2; ++i)
      halves[i] = _mm256_madd_epi16(
          halves[i], _mm256_load_si256(reinterpret_cast<const __m256i*>(numbers + i * kLanes)));
    std::memcpy(&sums, halves, sizeof sums);
#else
    for (int i = 0; i < kLanes; ++i)
      sums[i] = (codes[i] & 0xffff) * numbers[2 * i] + (codes[i] >> 16) * numbers[2 * i + 1];
#endif
    return sums;
  }
#endif
};

// kScales values, each for its share of the lanes.
template <int64_t kScales>
Vec spread(const float* values) {
  if constexpr (kScales == 1) return broadcast(values[0]);
  Vec4 four = {};
  std::memcpy(&four, values, kScales * sizeof(float));
  if constexpr (kScales == 2)
    return __builtin_shufflevector(four, four, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  return __builtin_shufflevector(four, four, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
}

// Some rows of a weight and some inputs; where there are fewer, the last ones stand for those that lack.
struct IntegerBlock {
  const uint8_t* codes[kIntegerRows];
  const float* scales[kIntegerRows];  // kScales for each unit
  const float* zeros[kIntegerRows];   // the same, where the weight has zero points
  const float* inputs[kIntegerTokens];
  int64_t whole_units;
  int64_t rest_bytes;   // of codes behind them
  int64_t scale_shift;  // units that share a scale are 2^scale_shift
};
using IntegerSums = float[kIntegerTokens][kIntegerRows];
using IntegerKernel = void (*)(const IntegerBlock&, IntegerSums&);

inline Vec to_floats(IntVec v) { return __builtin_convertvector(v, Vec); }

inline IntVec load_ints(const void* source, int64_t bytes = kUnitBytes) {
  IntVec loaded{};
  std::memcpy(&loaded, source, bytes);
  return loaded;
}

template <int64_t kScales, bool kZeroPoints, int64_t kTokens>
[[gnu::always_inline]] inline void add_unit(const IntegerBlock& block, int64_t unit, const IntVec* loaded,
                                            Vec (&sums)[kTokens][kIntegerRows]) {
  constexpr int32_t kMiddle = 8;
  for (int64_t r = 0; r < kIntegerRows; ++r) {
    const CodeUnit codes(loaded[r]);
    const int64_t place = (unit >> block.scale_shift) * kScales;
    const Vec scales = spread<kScales>(block.scales[r] + place);
    for (int64_t t = 0; t < kTokens; ++t) {
      const auto& x = reinterpret_cast<const RoundedUnit*>(block.inputs[t])[unit];
      const IntVec lane_sums = load_ints(x.lane_sums);
      Vec dots = to_floats(codes.dot(x, kZeroPoints ? IntVec{} : lane_sums * kMiddle));
      if constexpr (kZeroPoints) dots = dots - spread<kScales>(block.zeros[r] + place) * to_floats(lane_sums);
      sums[t][r] = sums[t][r] + dots * (scales * x.scale);
    }
  }
}

template <int64_t kScales, bool kZeroPoints, int64_t kTokens>
[[gnu::noinline]] void multiply_integers(const IntegerBlock& block, IntegerSums& products) {
  Vec sums[kTokens][kIntegerRows] = {};
  IntVec loaded[kIntegerRows];
  for (int64_t unit = 0; unit < block.whole_units; ++unit) {
    for (int64_t r = 0; r < kIntegerRows; ++r) {
      const uint8_t* codes = block.codes[r] + unit * kUnitBytes;
      __builtin_prefetch(codes + kPrefetchBytes);
      loaded[r] = load_ints(codes);
    }
    add_unit<kScales, kZeroPoints, kTokens>(block, unit, loaded, sums);
  }
  if (block.rest_bytes) {
    for (int64_t r = 0; r < kIntegerRows; ++r)
      loaded[r] = load_ints(block.codes[r] + block.whole_units * kUnitBytes, block.rest_bytes);
    add_unit<kScales, kZeroPoints, kTokens>(block, block.whole_units, loaded, sums);
  }
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t r = 0; r < kIntegerRows; ++r) products[t][r] = horizontal_sum(sums[t][r]);
}

// The kernels of a weight's format: for one input, and for several.
struct IntegerKernels {
  IntegerKernel one, several;

  template <int64_t kScales>
  static IntegerKernels with(bool zero_points) {
    if (zero_points)
      return {multiply_integers<kScales, true, 1>, multiply_integers<kScales, true, kIntegerTokens>};
    return {multiply_integers<kScales, false, 1>, multiply_integers<kScales, false, kIntegerTokens>};
  }

  static IntegerKernels of(const LowBitWeight& w, int64_t unit_scales) {
    const bool zeros = w.zero_points;
    if (unit_scales == 4) return with<4>(zeros);
    return unit_scales == 2 ? with<2>(zeros) : with<1>(zeros);
  }
};

// Products with a weight that takes rounded inputs.
template <typename Element>
class IntegerRows {
 public:
  explicit IntegerRows(const LowBitWeight& weight)
      : w_(weight),
        units_(num_units(weight.columns)),
        unit_scales_(
            weight.groups() > 1 && weight.group_size < kUnitColumns ? kUnitColumns / weight.group_size : 1),
        groups_(weight.groups()),
        group_units_(groups_ == 1 ? units_ : std::max<int64_t>(1, weight.group_size / kUnitColumns)),
        in_place_(std::is_same_v<Element, float> && !weight.zero_points &&
                  !(group_units_ & (group_units_ - 1)) && groups_ * group_units_ == units_ * unit_scales_),
        kernels_(IntegerKernels::of(weight, unit_scales_)) {
    if (in_place_) return;
    scales_ = aligned_floats(2 * kIntegerRows * units_ * unit_scales_);
    std::fill_n(scales_.get(), 2 * kIntegerRows * units_ * unit_scales_, 0.0f);  // behind the last group
  }

  // Some inputs at a time, which stay in the cache while all the rows pass.
  template <typename Store>
  void multiply(int64_t first, int64_t count, const InputRows& inputs, Store store) {
    for (int64_t token = 0; token < inputs.count; token += kTileInputs) {
      const int64_t end = std::min(token + kTileInputs, inputs.count);
      for (int64_t row = 0; row < count; row += kIntegerRows) {
        const int64_t rows = std::min(kIntegerRows, count - row);
        IntegerBlock block = block_of(first + row, rows);
        multiply_tokens(block, token, end, inputs, [&](int64_t t, const float* products) {
          for (int64_t r = 0; r < rows; ++r) store(t, row + r, products[r]);
        });
      }
    }
  }

 private:
  template <typename Store>
  void multiply_tokens(IntegerBlock& block, int64_t token, int64_t end, const InputRows& inputs,
                       Store store) {
    IntegerSums products;
    for (; token < end; token += kIntegerTokens) {
      const int64_t count = std::min(kIntegerTokens, end - token);
      for (int64_t t = 0; t < kIntegerTokens; ++t)
        block.inputs[t] = inputs.rows[token + std::min(t, count - 1)];
      (count == 1 ? kernels_.one : kernels_.several)(block, products);
      for (int64_t t = 0; t < count; ++t) store(token + t, products[t]);
    }
  }

  IntegerBlock block_of(int64_t first, int64_t count) {
    IntegerBlock block;
    const int64_t row_bytes = w_.columns / 2;
    block.whole_units = w_.columns / kUnitColumns;
    block.rest_bytes = w_.columns % kUnitColumns / 2;
    block.scale_shift = in_place_ ? __builtin_ctzll(group_units_) : 0;
    for (int64_t r = 0; r < kIntegerRows; ++r) {
      const int64_t row = first + std::min(r, count - 1);
      block.codes[r] = w_.codes + row * row_bytes;
      if (in_place_) {
        block.scales[r] = block.zeros[r] = static_cast<const float*>(w_.scales) + row * groups_;
        continue;
      }
      float* scales = scales_.get() + 2 * r * units_ * unit_scales_;
      block.scales[r] = scales;
      block.zeros[r] = scales + units_ * unit_scales_;
      copy_scales(row, scales);
    }
    return block;
  }

  // In float32, for each unit, and zero points behind them.
  void copy_scales(int64_t row, float* scales) const {
    float* zeros = scales + units_ * unit_scales_;
    for (int64_t g = 0, i = 0; g < groups_; ++g) {
      const float scale = to_float(static_cast<const Element*>(w_.scales)[row * groups_ + g]);
      const float zero = w_.zero_points ? zero_point(row, g) : 0.0f;
      for (int64_t repeat = 0; repeat < group_units_; ++repeat, ++i) {
        scales[i] = scale;
        zeros[i] = zero;
      }
    }
  }

  float zero_point(int64_t row, int64_t group) const {
    const uint8_t pair = w_.zero_points[row * ((groups_ + 1) / 2) + group / 2];
    return group % 2 ? pair >> 4 : pair & 15;
  }

  const LowBitWeight& w_;
  const int64_t units_, unit_scales_, groups_;
  const int64_t group_units_;  // whole units of a group, or 1
  const bool in_place_;        // whether scales are read where they are stored
  const IntegerKernels kernels_;
  AlignedFloats scales_;  // else of a block's rows, each with its zero points
};

}  // namespace ortolan::cpu::ORTOLAN_ISA
