// Rows of inputs as whole numbers of 16 bits, which codes of int4 and int8 multiply without rounding.
//
// A unit is 128 columns. They share a power of two, so that an input is off by at most 2^-15 of the largest
// of them. Codes are multiplied by words of 4 bytes. With VNNI a part of a word is every (8 / bits)th of its
// codes, four of them as bytes; else it is every (16 / bits)th, two of them in halves of the word.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/low_bit_params.h"
#include "lanes.h"

namespace ortolan::cpu::ORTOLAN_ISA {

constexpr int64_t kUnitColumns = 128;
constexpr int64_t kSmallestGroup = 32;

typedef int32_t IntRegister __attribute__((vector_size(sizeof(Register))));

// How a unit's codes lie, and the numbers they multiply.
template <int64_t kBits>
struct UnitLayout {
  static constexpr int64_t kBytes = kUnitColumns * kBits / 8;
  static constexpr int64_t kWords = kBytes / 4;
  static constexpr int64_t kSteps = kWords / kRegisterLanes;  // registers of codes
#if defined(__AVX512VNNI__)
  static constexpr int64_t kParts = 8 / kBits;
  static constexpr int64_t kPlanes = 2;  // high bytes of the numbers, and low ones
  static constexpr int32_t kMask = kBits == 4 ? 0x0f0f0f0f : -1;
#else
  static constexpr int64_t kParts = 16 / kBits;
  static constexpr int64_t kPlanes = 1;
  static constexpr int32_t kMask = kBits == 4 ? 0x000f000f : 0x00ff00ff;
#endif

  // Where the numbers for a part of a register of codes lie, among words.
  static constexpr int64_t place(int64_t step, int64_t part) {
    return (step * kParts + part) * kPlanes * kRegisterLanes;
  }
  // Where those for the same part of one word lie.
  static constexpr int64_t word_place(int64_t word, int64_t part) {
    return place(word / kRegisterLanes, part) + word % kRegisterLanes;
  }
};

// A unit of 16-bit numbers q; an input is `scale` * q. A number's two bytes are planes of `words` with VNNI,
// q = 256 * high + low, as signed bytes.
struct RoundedUnit {
  alignas(64) int32_t words[kUnitColumns / 2];
  int32_t sums[kUnitColumns / kSmallestGroup];  // of q
  float scale;                                  // NaN where an input is not finite

  template <int64_t kGroups>
  int32_t group_sum(int64_t group) const {
    if constexpr (kGroups == 4) return sums[group];
    if constexpr (kGroups == 2) return sums[2 * group] + sums[2 * group + 1];
    return sums[0] + sums[1] + sums[2] + sums[3];
  }
};

inline int64_t num_units(int64_t columns) { return (columns + kUnitColumns - 1) / kUnitColumns; }

// Whether a weight's groups are of whole quarters of a unit.
inline bool takes_rounded(const LowBitWeight& w) {
  if (w.format != LowBitFormat::kInt4 && w.format != LowBitFormat::kInt8) return false;
  const int64_t group = w.group_size;
  return w.groups() == 1 || group % kUnitColumns == 0 ||
         (kUnitColumns % group == 0 && group >= kSmallestGroup);
}

// Floats that a row of inputs takes, be they rounded or not.
inline int64_t input_floats(const LowBitWeight& w) {
  if (!takes_rounded(w)) return w.columns;
  const auto bytes = num_units(w.columns) * static_cast<int64_t>(sizeof(RoundedUnit));
  const int64_t floats = std::max<int64_t>(w.columns, bytes / sizeof(float));
  return (floats + kLanes - 1) / kLanes * kLanes;  // each row begins at a line of the cache
}

// The power of two that makes `largest` a number below 2^15 - 128, whose high byte is at most 127.
inline float rounding_step(float largest) {
  uint32_t bits;
  std::memcpy(&bits, &largest, sizeof bits);
  constexpr uint32_t kOver = 0x101ff;  // carries mantissas above 32639 / 16384 into the exponent
  bits = ((bits + kOver) & 0xff800000u) - (14u << 23);
  float step;
  std::memcpy(&step, &bits, sizeof step);
  return step;
}

constexpr int64_t kUnitVecs = kUnitColumns / kLanes;

// The lowest bytes of all lanes.
inline void store_low_bytes(IntVec v, int8_t* target) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  const Bytes bytes = __builtin_convertvector(v, Bytes);
  std::memcpy(target, &bytes, sizeof bytes);
}

inline void store_planes(IntVec numbers, int8_t* high) {
  store_low_bytes((numbers + 128) >> 8, high);
  store_low_bytes(numbers, high + 4 * kRegisterLanes);
}

template <int64_t kBits>
void place_numbers(const IntVec (&q)[kUnitVecs], RoundedUnit& unit) {
  using Layout = UnitLayout<kBits>;
#if defined(__AVX512VNNI__)
  int8_t* bytes = reinterpret_cast<int8_t*>(unit.words);
  for (int64_t i = 0; i < kUnitVecs; i += 2) {
    if constexpr (kBits == 4) {
      const IntVec even =
          __builtin_shufflevector(q[i], q[i + 1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      const IntVec odd =
          __builtin_shufflevector(q[i], q[i + 1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
      store_planes(even, bytes + 8 * i);
      store_planes(odd, bytes + 4 * Layout::place(0, 1) + 8 * i);
    } else {
      int8_t* high = bytes + 4 * Layout::place(i / 4, 0) + i % 4 * kLanes;
      store_planes(q[i], high);
      store_planes(q[i + 1], high + kLanes);
    }
  }
#else
  constexpr int64_t kParts = Layout::kParts;
  for (int64_t word = 0; word < Layout::kWords; ++word)
    for (int64_t part = 0; part < kParts; ++part) {
      const int64_t first = 2 * kParts * word + part, second = first + kParts;
      const int32_t a = q[first / kLanes][first % kLanes], b = q[second / kLanes][second % kLanes];
      unit.words[Layout::word_place(word, part)] =
          static_cast<int32_t>((static_cast<uint32_t>(b) << 16) | (static_cast<uint32_t>(a) & 0xffffu));
    }
#endif
}

inline int32_t lane_sum(IntVec v) {
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += v[lane];
  return sum;
}

template <int64_t kBits>
void round_unit(const float* values, int64_t count, RoundedUnit& unit) {
  constexpr float kSmallest = 7.9e-31f;  // 2^-100: the reciprocals of steps stay finite
  Vec x[kUnitVecs], top = {}, zeros = {};
  for (int64_t i = 0; i < kUnitVecs; ++i) {
    const int64_t first = i * kLanes;
    x[i] = first < count ? load_part(values + first, count - first) : Vec{};
    top = maximum(select(x[i] < 0.0f, -x[i], x[i]), top);
    zeros = zeros + x[i] * 0.0f;
  }
  const float largest = horizontal_max(top), not_finite = horizontal_sum(zeros);
  const bool usable = not_finite == 0 && largest >= kSmallest;
  const float step = usable ? rounding_step(largest) : 1.0f, inverse = usable ? 1.0f / step : 0.0f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  IntVec q[kUnitVecs];
  for (int64_t i = 0; i < kUnitVecs; ++i)
    q[i] = usable ? __builtin_convertvector((x[i] * inverse + kRound) - kRound, IntVec) : IntVec{};
  place_numbers<kBits>(q, unit);
  constexpr int64_t kSumVecs = kSmallestGroup / kLanes;
  for (int64_t i = 0; i < kUnitVecs; i += kSumVecs) unit.sums[i / kSumVecs] = lane_sum(q[i] + q[i + 1]);
  unit.scale = usable ? step : not_finite;
}

// Rounds a row of a weight's inputs, which may lie where the units go: no unit is larger than its inputs.
inline void round_inputs(const LowBitWeight& w, const float* values, float* target) {
  static_assert(sizeof(RoundedUnit) <= kUnitColumns * sizeof(float));
  auto* units = reinterpret_cast<RoundedUnit*>(target);
  for (int64_t first = 0; first < w.columns; first += kUnitColumns, ++units) {
    const int64_t count = std::min(kUnitColumns, w.columns - first);
    if (code_bits(w.format) == 4)
      round_unit<4>(values + first, count, *units);
    else
      round_unit<8>(values + first, count, *units);
  }
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
