// Integer products on tensor cores: 16 lines of 32 bytes without a sign by 8 columns of bytes with one.
#pragma once

#include <cstdint>

namespace ortolan::cuda {

// sum[16x8] += a[16x32] * b[32x8].
__device__ __forceinline__ void multiply_bytes(int (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// a[16x32] * b[32x8] of less than 2^22, each as kByteSumBase plus the product: 1.5 * 2^23, so that the bits
// are a float without a conversion.
constexpr uint32_t kByteSumBase = 0x4B400000u;
__device__ __forceinline__ void multiply_bytes(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
  uint32_t bits[4];
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};\n"
      : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(kByteSumBase));
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = __uint_as_float(bits[i]);
}

}  // namespace ortolan::cuda
