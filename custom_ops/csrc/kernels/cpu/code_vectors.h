// Sixteen codes of a weight of few bits at a time: how they are loaded, and what they stand for.
#pragma once

#include "element.h"
#include "kernels/low_bit_params.h"
#include "vec.h"

namespace ortolan::cpu::ORTOLAN_ISA {

typedef uint8_t CodeVec __attribute__((vector_size(16)));

// Sixteen bytes, as integers.
inline IntVec widen_bytes(CodeVec bytes) {
#if defined(__AVX512F__)
  return reinterpret_cast<IntVec>(_mm512_cvtepu8_epi32(reinterpret_cast<__m128i>(bytes)));
#elif defined(__AVX2__)
  const __m128i low = reinterpret_cast<__m128i>(bytes), high = _mm_srli_si128(low, 8);
  const __m256i halves[2] = {_mm256_cvtepu8_epi32(low), _mm256_cvtepu8_epi32(high)};
  IntVec wide;
  std::memcpy(&wide, halves, sizeof wide);
  return wide;
#else
  IntVec wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = bytes[i];
  return wide;
#endif
}

inline CodeVec load_bytes(const uint8_t* source) {
  CodeVec bytes;
  std::memcpy(&bytes, source, sizeof bytes);
  return bytes;
}

// Sixteen codes of 4 bits in their order, as bytes.
inline CodeVec load_nibbles(const uint8_t* source) {
  CodeVec bytes{};
  std::memcpy(&bytes, source, 8);
  const CodeVec low = bytes & 15, high = bytes >> 4;
  return __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

// table[index & 15] of each lane.
inline Vec lookup(Vec table, IntVec index) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(
      _mm512_permutexvar_ps(reinterpret_cast<__m512i>(index), reinterpret_cast<__m512>(table)));
#elif defined(__AVX2__)
  __m256 tables[2], halves[2];
  __m256i indices[2];
  std::memcpy(tables, &table, sizeof table);
  std::memcpy(indices, &index, sizeof index);
  for (int i = 0; i < 2; ++i)
    halves[i] = _mm256_blendv_ps(_mm256_permutevar8x32_ps(tables[0], indices[i]),
                                 _mm256_permutevar8x32_ps(tables[1], indices[i]),
                                 _mm256_castsi256_ps(_mm256_slli_epi32(indices[i], 28)));
  Vec found;
  std::memcpy(&found, halves, sizeof found);
  return found;
#else
  Vec found;
  for (int i = 0; i < kLanes; ++i) found[i] = table[index[i] & 15];
  return found;
#endif
}

inline Vec decode_e4m3(CodeVec codes) {
#if defined(__F16C__) && defined(__AVX2__)
  // A half has e4m3's mantissa and more; its exponents are rebiased by a multiplication. All ones are NaN.
  const __m256i wide = _mm256_cvtepu8_epi16(reinterpret_cast<__m128i>(codes));
  const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(wide, magnitude), 8);
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
  const __m256i bits = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign), nan);
  Half halves[kLanes];
  float values[kLanes];
  std::memcpy(halves, &bits, sizeof bits);
  load_row(halves, kLanes, values);
  return load(values) * 256.0f;
#else
  const IntVec code = widen_bytes(codes);
  const IntVec bits = (code & 0x7f) << 20;
  Vec magnitude;
  std::memcpy(&magnitude, &bits, sizeof bits);
  magnitude = magnitude * 1.329227995784916e36f;  // 2^120 also normalises subnormal values
  const Vec value = select((code & 0x80) != 0, -magnitude, magnitude);
  return select((code & 0x7f) == 0x7f, broadcast(__builtin_nanf("")), value);
#endif
}

inline float decode_e4m3(uint8_t code) { return decode_e4m3(CodeVec{} + code)[0]; }

// 2^(code - 127), subnormal for code 0 and infinite for code 255.
inline float decode_e8m0(uint8_t code) {
  const uint32_t bits = code ? static_cast<uint32_t>(code) << 23 : 0x00400000u;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// What a group's codes are multiplied by, and what is subtracted before.
struct GroupScale {
  float scale;
  float zero;
};

// What the sixteen codes of 4 bits stand for in a group.
template <LowBitFormat kFormat>
Vec group_table(GroupScale by) {
  if constexpr (kFormat == LowBitFormat::kInt4) {
    const Vec codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (codes - by.zero) * by.scale;
  } else {
    const Vec e2m1 = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return e2m1 * by.scale;
  }
}

// Sixteen weights of 8 bits.
template <LowBitFormat kFormat>
Vec decode_bytes(CodeVec codes, GroupScale by) {
  if constexpr (kFormat == LowBitFormat::kFp8)
    return decode_e4m3(codes) * by.scale;
  else
    return (__builtin_convertvector(widen_bytes(codes), Vec) - by.zero) * by.scale;
}

template <typename Element, LowBitFormat kFormat>
GroupScale group_scale(const LowBitWeight& w, int64_t row, int64_t group) {
  const int64_t groups = w.groups(), place = row * groups + group;
  if constexpr (kFormat == LowBitFormat::kFp8)
    return {w.float_scales[row / w.scale_rows * groups + group], 0};
  if constexpr (kFormat == LowBitFormat::kMxfp4) return {decode_e8m0(w.scale_codes[place]), 0};
  if constexpr (kFormat == LowBitFormat::kNvfp4)
    return {decode_e4m3(w.scale_codes[place]) * w.float_scales[row], 0};
  GroupScale by{to_float(static_cast<const Element*>(w.scales)[place]),
                code_bits(kFormat) == 4 ? 8.0f : 128.0f};
  if (w.zero_points && kFormat == LowBitFormat::kInt8) by.zero = w.zero_points[place];
  if (w.zero_points && kFormat == LowBitFormat::kInt4) {
    const uint8_t pair = w.zero_points[row * ((groups + 1) / 2) + group / 2];
    by.zero = group % 2 ? pair >> 4 : pair & 15;
  }
  return by;
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
