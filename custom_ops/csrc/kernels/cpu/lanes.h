// Rows of stored elements, read and written in lanes of float32.
#pragma once

#include <algorithm>
#include <cmath>

#include "element.h"
#include "vec.h"

namespace ortolan::cpu::ORTOLAN_ISA {

inline Vec load_lanes(const float* source) { return load(source); }
inline Vec load_lanes(const Half* source) {
#if defined(__F16C__)
  __m128i low, high;
  std::memcpy(&low, source, sizeof low);
  std::memcpy(&high, source + kLanes / 2, sizeof high);
  const __m256 halves[2] = {_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)};
  Vec v;
  std::memcpy(&v, halves, sizeof v);
  return v;
#else
  float lanes[kLanes];
  load_row(source, kLanes, lanes);
  return load(lanes);
#endif
}

// As many elements as a register has lanes.
inline Register load_few_lanes(const float* source) { return load_register(source); }
inline Register load_few_lanes(const Half* source) {
#if defined(__AVX512F__)
  return load_lanes(source);
#elif defined(__F16C__)
  __m128i halves;
  std::memcpy(&halves, source, sizeof halves);
  return reinterpret_cast<Register>(_mm256_cvtph_ps(halves));
#else
  float lanes[kRegisterLanes];
  load_row(source, kRegisterLanes, lanes);
  return load_register(lanes);
#endif
}

inline void store_lanes(Vec v, float* target) { store(target, v); }
inline void store_lanes(Vec v, Half* target) {
#if defined(__F16C__)
  float lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < kLanes; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(lanes + i), _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(target + i, &halves, sizeof halves);
  }
#else
  float lanes[kLanes];
  store(lanes, v);
  store_row(lanes, kLanes, target);
#endif
}

// The first `count` elements, at most a vector of them; the other lanes are 0.
template <typename Element>
Vec load_part(const Element* source, int64_t count) {
  if (count >= kLanes) return load_lanes(source);
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = to_float(source[i]);
  return load(lanes);
}

// Writes the first `count` lanes, at most a vector of them.
template <typename Element>
void store_part(Vec v, int64_t count, Element* target) {
  if (count >= kLanes) return store_lanes(v, target);
  float lanes[kLanes];
  store(lanes, v);
  store_row(lanes, count, target);
}

template <typename Element>
void load_floats(const Element* source, int64_t count, float* target) {
  for (int64_t i = 0; i < count; i += kLanes)
    store_part(load_part(source + i, count - i), count - i, target + i);
}

inline float dot(const float* a, const float* b, int64_t size) {
  Register sums[kVecRegisters] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    for (int64_t v = 0; v < kVecRegisters; ++v) {
      const int64_t at = i + v * kRegisterLanes;
      sums[v] = sums[v] + load_register(a + at) * load_register(b + at);
    }
  float sum = horizontal_sum(as_vec(sums));
  for (; i < size; ++i) sum = std::fma(a[i], b[i], sum);
  return sum;
}

// What makes the mean square of a row 1.
inline float inverse_root_mean_square(const float* row, int64_t size, float epsilon) {
  return 1.0f / std::sqrt(dot(row, row, size) / static_cast<float>(size) + epsilon);
}

inline Vec sigmoid(Vec x) {
  const Vec small = exponential(select(x < 0.0f, x, -x));
  return select(x < 0.0f, small, broadcast(1.0f)) / (1.0f + small);
}

inline Vec silu(Vec x) { return x * sigmoid(x); }

template <typename Function>
Vec each_lane(Vec x, Function function) {
  float lanes[kLanes];
  store(lanes, x);
  for (float& lane : lanes) lane = function(lane);
  return load(lanes);
}

inline Vec gelu(Vec x) {
  return 0.5f * x * (1.0f + each_lane(x, [](float lane) { return std::erf(lane * 0.70710678118654752f); }));
}

inline Vec gelu_tanh(Vec x) {
  return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
