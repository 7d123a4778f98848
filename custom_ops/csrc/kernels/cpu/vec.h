// Sixteen floats as one value, and the few functions the attention kernels need of them.
//
// The compiler's vector extension lowers one source to AVX-512, AVX2 or plain code, by the flags of the
// translation unit; each unit defines ORTOLAN_ISA, the namespace its instantiation lives in.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace ortolan::cpu::ORTOLAN_ISA {

constexpr int64_t kLanes = 16;

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));

inline Vec load(const float* source) {
  Vec v;
  std::memcpy(&v, source, sizeof v);
  return v;
}

inline void store(float* target, Vec v) { std::memcpy(target, &v, sizeof v); }

inline Vec broadcast(float x) { return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// V: Vec or Register, here and in the functions below; what comparisons give is a vector of integers.
template <typename V>
inline V select(decltype(V() < V()) mask, V yes, V no) {
  return mask ? yes : no;
}

template <typename V>
inline V maximum(V a, V b) {
  return a > b ? a : b;
}

typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec4 __attribute__((vector_size(16)));

// What one register holds. Sums that loops carry are of this type: the compiler keeps longer vectors in
// memory.
#if defined(__AVX512F__)
typedef Vec Register;
#elif defined(__AVX__)
typedef Vec8 Register;
#else
typedef Vec4 Register;
#endif
constexpr int64_t kRegisterLanes = sizeof(Register) / sizeof(float);
constexpr int64_t kVecRegisters = kLanes / kRegisterLanes;

inline Register load_register(const float* source) {
  Register v;
  std::memcpy(&v, source, sizeof v);
  return v;
}

inline void store_register(float* target, Register v) { std::memcpy(target, &v, sizeof v); }

inline Vec as_vec(const Register (&registers)[kVecRegisters]) {
  Vec v;
  std::memcpy(&v, registers, sizeof v);
  return v;
}
inline void as_registers(Vec v, Register (&registers)[kVecRegisters]) {
  std::memcpy(registers, &v, sizeof v);
}

inline float horizontal_max(Vec v) {
  const Vec8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  const Vec8 b = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  const Vec8 eight = a > b ? a : b;
  const Vec4 c = __builtin_shufflevector(eight, eight, 0, 1, 2, 3);
  const Vec4 d = __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  const Vec4 four = c > d ? c : d;
  const float even = four[0] > four[2] ? four[0] : four[2];
  const float odd = four[1] > four[3] ? four[1] : four[3];
  return even > odd ? even : odd;
}

// Sums in a fixed tree, so the result depends on the values alone.
inline float horizontal_sum(Vec v) {
  const Vec8 eight = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  const Vec4 four =
      __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Transposes an 8x8 block in registers: columns[i][j] = rows[j][i], rows lying a stride of floats apart.
inline void transpose_block(const float* rows, int64_t row_stride, Vec8 (&columns)[8]) {
  Vec8 a[8], b[8];
  for (int i = 0; i < 8; ++i) std::memcpy(&a[i], rows + i * row_stride, sizeof(Vec8));
  for (int i = 0; i < 8; i += 2) {
    b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int k = 0; k < 2; ++k) {
      a[i + 2 * k] = __builtin_shufflevector(b[i + k], b[i + k + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      a[i + 2 * k + 1] = __builtin_shufflevector(b[i + k], b[i + k + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; ++i) {
    columns[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    columns[i + 4] = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
inline void transpose_block(const float* rows, int64_t row_stride, float* columns, int64_t column_stride) {
  Vec8 turned[8];
  transpose_block(rows, row_stride, turned);
  for (int i = 0; i < 8; ++i) std::memcpy(columns + i * column_stride, &turned[i], sizeof(Vec8));
}

// to = the elements of `from` by turns from its lower and its upper half.
#if defined(__AVX512F__)
inline void interleave_halves(const Register (&from)[kRegisterLanes], Register (&to)[kRegisterLanes]) {
  for (int i = 0; i < kRegisterLanes / 2; ++i) {
    const Register a = from[i], b = from[i + kRegisterLanes / 2];
    to[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    to[2 * i + 1] =
        __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
}
#endif

// Transposes as many rows of kCount floats as a register has lanes: columns[i][j] = rows[j][i], rows lying a
// stride of floats apart.
template <int64_t kCount>
inline void transpose_lanes(const float* rows, int64_t stride, Register (&columns)[kRegisterLanes]) {
#if defined(__AVX512F__)
  // Each turn of four moves one bit of an element's place from its row to its column.
  Register turned[kRegisterLanes];
  constexpr auto kMask = static_cast<__mmask16>((1u << kCount) - 1);
  for (int i = 0; i < kRegisterLanes; ++i)
    columns[i] = reinterpret_cast<Register>(_mm512_maskz_loadu_ps(kMask, rows + i * stride));
  interleave_halves(columns, turned);
  interleave_halves(turned, columns);
  interleave_halves(columns, turned);
  interleave_halves(turned, columns);
#elif defined(__AVX__)
  transpose_block(rows, stride, columns);
#else
  for (int i = 0; i < kRegisterLanes; ++i)
    columns[i] = Register{rows[i], rows[stride + i], rows[2 * stride + i], rows[3 * stride + i]};
#endif
}

// e^x for x <= 0 (relative error near 1e-7); 0 below the range of normal floats, -inf included.
template <typename V>
inline V exponential(V x) {
  using Ints = decltype(x < x);
  const float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const V low = V{} - 87.0f;
  const Ints underflow = x < low;
  x = select(underflow, low, x);
  const V n = (x * kLog2E + kRound) - kRound;
  const V r = (x - n * kLn2High) - n * kLn2Low;
  V y = V{} + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  V scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return select(underflow, V{}, y * scale);
}

// tanh: an odd polynomial near 0 (coefficients of the Cephes library's tanhf), else by the exponential.
template <typename V>
inline V hyperbolic_tangent(V x) {
  const V magnitude = select(x < 0.0f, -x, x);
  const V square = x * x;
  V p = V{} - 5.70498872745e-3f;
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const V small = p * square * x + x;
  const V decay = exponential(magnitude * -2.0f);
  const V large = (1.0f - decay) / (1.0f + decay);
  return select(magnitude < 0.625f, small, select(x < 0.0f, -large, large));
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
