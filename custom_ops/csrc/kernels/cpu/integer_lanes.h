// Whole numbers in the lanes of registers: exact products of codes, and how lanes are moved, transposed and
// added up.
#pragma once

#include <utility>

#include "rounded_inputs.h"

namespace ortolan::cpu::ORTOLAN_ISA {

inline IntRegister load_words(const void* source) {
  IntRegister words;
  std::memcpy(&words, source, sizeof words);
  return words;
}

inline Register to_floats(IntRegister v) { return __builtin_convertvector(v, Register); }

// sum + the products of a part of codes with numbers.
inline IntRegister add_products(IntRegister sum, IntRegister codes, IntRegister numbers) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<IntRegister>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(codes), reinterpret_cast<__m512i>(numbers)));
#elif defined(__AVX512BW__)
  return sum + reinterpret_cast<IntRegister>(
                   _mm512_madd_epi16(reinterpret_cast<__m512i>(codes), reinterpret_cast<__m512i>(numbers)));
#elif defined(__AVX2__)
  return sum + reinterpret_cast<IntRegister>(
                   _mm256_madd_epi16(reinterpret_cast<__m256i>(codes), reinterpret_cast<__m256i>(numbers)));
#else
  return sum + (codes & 0xffff) * (numbers << 16 >> 16) + (codes >> 16) * (numbers >> 16);
#endif
}

// Exact sums of the planes of numbers.
template <int64_t kPlanes>
struct PlaneSums {
  IntRegister planes[kPlanes] = {};

  void add(IntRegister codes, const int32_t* numbers) {
    for (int64_t p = 0; p < kPlanes; ++p)
      planes[p] = add_products(planes[p], codes, load_words(numbers + p * kRegisterLanes));
  }
  // Of one word of numbers for all lanes.
  void add_broadcast(IntRegister codes, const int32_t* numbers) {
    for (int64_t p = 0; p < kPlanes; ++p)
      planes[p] = add_products(planes[p], codes, IntRegister{} + numbers[p * kRegisterLanes]);
  }
  IntRegister total() const {
    if constexpr (kPlanes == 1) return planes[0];
    return (planes[0] << 8) + planes[kPlanes - 1];
  }
};

// A register whose lane i is lane kSource(i) of `a` and `b`, one behind the other.
template <auto kSource, int... kLane>
inline IntRegister pick_lanes(IntRegister a, IntRegister b, std::integer_sequence<int, kLane...>) {
  return reinterpret_cast<IntRegister>(__builtin_shufflevector(
      reinterpret_cast<Register>(a), reinterpret_cast<Register>(b), kSource(kLane)...));
}
template <auto kSource>
inline IntRegister pick_lanes(IntRegister a, IntRegister b) {
  return pick_lanes<kSource>(a, b, std::make_integer_sequence<int, kRegisterLanes>());
}

// Lanes lie in blocks of four. Place 0 to 3 in a lane's block of the first of two registers, 4 to 7 in that
// of the second.
constexpr int in_blocks(int lane, int place) {
  return lane - lane % 4 + place % 4 + (place < 4 ? 0 : static_cast<int>(kRegisterLanes));
}

// Neighbours added within each block: in each, two sums of `a`, then two of `b`.
inline IntRegister fold_lanes(IntRegister a, IntRegister b) {
  return pick_lanes<[](int lane) { return in_blocks(lane, lane % 4 * 2); }>(a, b) +
         pick_lanes<[](int lane) { return in_blocks(lane, lane % 4 * 2 + 1); }>(a, b);
}

// The even blocks of `a`, then those of `b`; and the odd ones.
inline IntRegister even_blocks(IntRegister a, IntRegister b) {
  return pick_lanes<[](int lane) { return lane / 4 * 8 + lane % 4; }>(a, b);
}
inline IntRegister odd_blocks(IntRegister a, IntRegister b) {
  return pick_lanes<[](int lane) { return lane / 4 * 8 + lane % 4 + 4; }>(a, b);
}

// Transposes four rows of blocks: lane j of a block of rows[i] becomes lane i of that block of rows[j].
inline void turn_blocks(IntRegister (&rows)[4]) {
  constexpr auto kLow = [](int lane) { return in_blocks(lane, lane % 2 * 4 + lane % 4 / 2); };
  constexpr auto kHigh = [](int lane) { return in_blocks(lane, lane % 2 * 4 + lane % 4 / 2 + 2); };
  constexpr auto kFirst = [](int lane) { return in_blocks(lane, lane % 4 / 2 * 4 + lane % 2); };
  constexpr auto kLast = [](int lane) { return in_blocks(lane, lane % 4 / 2 * 4 + lane % 2 + 2); };
  const IntRegister low[2] = {pick_lanes<kLow>(rows[0], rows[1]), pick_lanes<kLow>(rows[2], rows[3])};
  const IntRegister high[2] = {pick_lanes<kHigh>(rows[0], rows[1]), pick_lanes<kHigh>(rows[2], rows[3])};
  rows[0] = pick_lanes<kFirst>(low[0], low[1]);
  rows[1] = pick_lanes<kLast>(low[0], low[1]);
  rows[2] = pick_lanes<kFirst>(high[0], high[1]);
  rows[3] = pick_lanes<kLast>(high[0], high[1]);
}

constexpr int64_t kBlocks = kRegisterLanes / 4;  // of a register

// Blocks that lie `stride` bytes apart.
inline IntRegister load_blocks(const uint8_t* source, [[maybe_unused]] int64_t stride) {
#if defined(__AVX2__)
  const auto block = [&](int64_t i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i * stride));
  };
#endif
#if defined(__AVX512F__)
  __m512i blocks = _mm512_inserti32x4(_mm512_castsi128_si512(block(0)), block(1), 1);
  blocks = _mm512_inserti32x4(_mm512_inserti32x4(blocks, block(2), 2), block(3), 3);
  return reinterpret_cast<IntRegister>(blocks);
#elif defined(__AVX2__)
  return reinterpret_cast<IntRegister>(
      _mm256_inserti128_si256(_mm256_castsi128_si256(block(0)), block(1), 1));
#else
  static_assert(kBlocks == 1);
  return load_words(source);
#endif
}

// Block b of quads[q] has sums of rows 4q .. 4q + 3, over the b-th part of the columns. Gives sums of kGroups
// equal parts, each with a row in a lane.
template <int64_t kGroups>
inline void gather_rows(const IntRegister (&quads)[kBlocks], IntRegister (&groups)[kGroups]) {
  if constexpr (kBlocks == 1) {
    groups[0] = quads[0];
  } else if constexpr (kBlocks == 2) {
    const IntRegister first = even_blocks(quads[0], quads[1]), second = odd_blocks(quads[0], quads[1]);
    groups[0] = kGroups == 1 ? first + second : first;
    if constexpr (kGroups == 2) groups[1] = second;
  } else {
    const IntRegister even[2] = {even_blocks(quads[0], quads[1]), even_blocks(quads[2], quads[3])};
    const IntRegister odd[2] = {odd_blocks(quads[0], quads[1]), odd_blocks(quads[2], quads[3])};
    if constexpr (kGroups == 4) {
      groups[0] = even_blocks(even[0], even[1]);
      groups[1] = even_blocks(odd[0], odd[1]);
      groups[2] = odd_blocks(even[0], even[1]);
      groups[3] = odd_blocks(odd[0], odd[1]);
    } else {
      const IntRegister halves[2] = {even[0] + odd[0], even[1] + odd[1]};
      const IntRegister first = even_blocks(halves[0], halves[1]), second = odd_blocks(halves[0], halves[1]);
      groups[0] = kGroups == 1 ? first + second : first;
      if constexpr (kGroups == 2) groups[1] = second;
    }
  }
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
