// Rows of inputs as whole numbers of 16 bits, which codes of int4 multiply without rounding.
//
// A unit is what 64 bytes of codes multiply, 128 columns. They share a power of two, so that an input is off
// by at most 2^-15 of the largest of them. A lane is 4 bytes of codes.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/low_bit_params.h"
#include "vec.h"

namespace ortolan::cpu::ORTOLAN_ISA {

constexpr int64_t kUnitBytes = 64, kUnitColumns = 128;
constexpr int64_t kCodeParts = 2;  // codes of a byte

// Whether a weight is int4 whose scales belong to whole lanes of a unit, 4 at least.
inline bool takes_rounded(const LowBitWeight& w) {
  if (w.format != LowBitFormat::kInt4) return false;
  const int64_t group = w.group_size;
  return w.groups() == 1 || group % kUnitColumns == 0 || (kUnitColumns % group == 0 && group >= 32);
}

// A unit of 16-bit numbers q; an input is `scale` * q.
//
// With VNNI `numbers` are bytes: of each part of a code byte, the high bytes of the numbers,
// then the low ones, with q = 256 * high + low. Else they are pairs: of each part of a lane's bytes 0 and 2,
// and of its bytes 1 and 3, their numbers, lane by lane.
struct RoundedUnit {
  alignas(64) int16_t numbers[kUnitColumns];
  int32_t lane_sums[kLanes];  // of q, over the columns of a lane
  float scale;                // NaN where an input is not finite
};

inline int64_t num_units(int64_t columns) { return (columns + kUnitColumns - 1) / kUnitColumns; }

// Floats that a row of inputs takes, be they rounded or not.
inline int64_t input_floats(const LowBitWeight& w) {
  if (!takes_rounded(w)) return w.columns;
  const auto bytes = num_units(w.columns) * static_cast<int64_t>(sizeof(RoundedUnit));
  const int64_t floats = std::max<int64_t>(w.columns, bytes / sizeof(float));
  return (floats + kLanes - 1) / kLanes * kLanes;  // each row begins at a line of the cache
}

// The power of two that makes `largest` a number below 2^15 - 128, whose high byte is at most 127.
inline float rounding_step(float largest) {
  int exponent;
  const float fraction = std::frexp(largest, &exponent);
  return std::ldexp(1.0f, exponent - (fraction > 32639.0f / 32768.0f ? 14 : 15));
}

// Where the number of a unit's column lies, among int16_t.
constexpr int64_t pair_place(int64_t column) {
  const int64_t byte = column / kCodeParts, part = column % kCodeParts, lane = byte / 4, within = byte % 4;
  return ((within % 2 * kCodeParts + part) * kLanes + lane) * 2 + within / 2;
}

inline void place_numbers(const int16_t* numbers, RoundedUnit& unit) {
#if defined(__AVX512VNNI__)
  int8_t* bytes = reinterpret_cast<int8_t*>(unit.numbers);
  for (int64_t part = 0; part < kCodeParts; ++part, bytes += 2 * kUnitBytes)
    for (int64_t i = 0; i < kUnitBytes; ++i) {
      const int32_t q = numbers[i * kCodeParts + part], high = (q + 128) >> 8;
      bytes[i] = static_cast<int8_t>(high);
      bytes[kUnitBytes + i] = static_cast<int8_t>(q - 256 * high);
    }
#else
  for (int64_t i = 0; i < kUnitColumns; ++i) unit.numbers[pair_place(i)] = numbers[i];
#endif
  constexpr int64_t kLaneColumns = 4 * kCodeParts;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    int32_t sum = 0;
    for (int64_t i = 0; i < kLaneColumns; ++i) sum += numbers[lane * kLaneColumns + i];
    unit.lane_sums[lane] = sum;
  }
}

inline void round_unit(const float* values, int64_t count, RoundedUnit& unit) {
  constexpr float kSmallest = 7.9e-31f;  // 2^-100: the reciprocals of steps stay finite
  float padded[kUnitColumns];
  std::memcpy(padded, values, count * sizeof(float));
  std::fill_n(padded + count, kUnitColumns - count, 0.0f);
  Vec top = {}, zeros = {};
  for (int64_t i = 0; i < kUnitColumns; i += kLanes) {
    const Vec x = load(padded + i);
    top = maximum(select(x < 0.0f, -x, x), top);
    zeros = zeros + x * 0.0f;
  }
  const float largest = horizontal_max(top), not_finite = horizontal_sum(zeros);
  const bool usable = not_finite == 0 && largest >= kSmallest;
  const float step = usable ? rounding_step(largest) : 1.0f, inverse = usable ? 1.0f / step : 0.0f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  int16_t numbers[kUnitColumns];
  for (int64_t i = 0; i < kUnitColumns; i += kLanes) {
    const Vec x = usable ? load(padded + i) : Vec{};
    const IntVec q = __builtin_convertvector((x * inverse + kRound) - kRound, IntVec);
    for (int64_t lane = 0; lane < kLanes; ++lane) numbers[i + lane] = static_cast<int16_t>(q[lane]);
  }
  place_numbers(numbers, unit);
  unit.scale = usable ? step : not_finite;
}

// Rounds a row of `count` inputs, which may lie where the units go: no unit is larger than its inputs.
inline void round_inputs(const float* values, int64_t count, float* target) {
  static_assert(sizeof(RoundedUnit) <= kUnitColumns * sizeof(float));
  auto* units = reinterpret_cast<RoundedUnit*>(target);
  for (int64_t first = 0; first < count; first += kUnitColumns, ++units)
    round_unit(values + first, std::min(kUnitColumns, count - first), *units);
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
