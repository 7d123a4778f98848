// Codes of caches as pairs of float16, without their scales: every code is exact.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "rows.cuh"

namespace ortolan::cuda {

// Takes four codes: of_neighbours makes pairs of bytes 0, 1 and of 2, 3; of_alternate of 0, 2 and of 1, 3.
template <typename Code>
struct Halves;

// The low bits of a float16 from 1024 on count in ones.
// Source: Kim et al., "Who Says Elephants Can't Run" (2022), section 3.
template <>
struct Halves<Int8Code> {
  static __device__ __forceinline__ uint32_t shift(uint32_t pair) {
    const uint32_t origin = 0x64806480u;  // 1024 + 128
    const __half2 value =
        __hsub2(reinterpret_cast<const __half2&>(pair), reinterpret_cast<const __half2&>(origin));
    return reinterpret_cast<const uint32_t&>(value);
  }
  static __device__ __forceinline__ void of_neighbours(uint32_t codes, uint32_t& first, uint32_t& second) {
    codes ^= 0x80808080u;
    first = shift(__byte_perm(codes, 0x64646464u, 0x4140));
    second = shift(__byte_perm(codes, 0x64646464u, 0x4342));
  }
  static __device__ __forceinline__ void of_alternate(uint32_t codes, uint32_t& first, uint32_t& second) {
    codes ^= 0x80808080u;
    first = shift(__byte_perm(codes, 0x64646464u, 0x4240));
    second = shift(__byte_perm(codes, 0x64646464u, 0x4341));
  }
};

#if __CUDA_ARCH__ >= 890
template <>
struct Halves<Float8Code> {
  static __device__ __forceinline__ void of_neighbours(uint32_t codes, uint32_t& first, uint32_t& second) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
        : "=r"(first), "=r"(second)
        : "r"(codes));
  }
  static __device__ __forceinline__ void of_alternate(uint32_t codes, uint32_t& first, uint32_t& second) {
    of_neighbours(__byte_perm(codes, 0, 0x3120), first, second);
  }
};
#else
// Exponents are rebiased by a multiplication, which makes subnormals right.
template <>
struct Halves<Float8Code> {
  // `pair`: codes in the high bytes of both halves.
  static __device__ __forceinline__ uint32_t shift(uint32_t pair) {
    const uint32_t bits = (pair & 0x80008000u) | (pair & 0x7f007f00u) >> 1;
    const __half2 value = __hmul2(reinterpret_cast<const __half2&>(bits), __float2half2_rn(256.0f));
    return reinterpret_cast<const uint32_t&>(value);
  }
  static __device__ __forceinline__ void of_neighbours(uint32_t codes, uint32_t& first, uint32_t& second) {
    first = shift(__byte_perm(codes, 0, 0x1404));
    second = shift(__byte_perm(codes, 0, 0x3424));
  }
  static __device__ __forceinline__ void of_alternate(uint32_t codes, uint32_t& first, uint32_t& second) {
    first = shift(codes << 8);
    second = shift(codes);
  }
};
#endif

}  // namespace ortolan::cuda
