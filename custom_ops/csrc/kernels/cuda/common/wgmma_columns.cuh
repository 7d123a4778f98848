// wgmma of 64 rows and any multiple of 16 columns up to 160, one call for each: sum[64 x columns] (+)= a[64 x
// 16] * b[16 x columns], as in wgmma.cuh, both contiguous along the axis that is summed over. The sums of
// fewer columns lie in the first registers of the same array.
#pragma once

#include "wgmma.cuh"

namespace ortolan::cuda {

constexpr int kMostColumns = 160;

// kColumns: of this call. a comes from shared memory, or from registers as in an m16n8k16 product.
template <typename Element, int kColumns>
struct ColumnsProduct;

// The first registers of 16 columns more, and as operands.
// clang-format off
#define ORTOLAN_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define ORTOLAN_SUMS_16 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define ORTOLAN_NAMES_32 ORTOLAN_NAMES_16 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define ORTOLAN_SUMS_32 ORTOLAN_SUMS_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define ORTOLAN_NAMES_48 ORTOLAN_NAMES_32 ", " "%16, %17, %18, %19, %20, %21, %22, %23"
#define ORTOLAN_SUMS_48 ORTOLAN_SUMS_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define ORTOLAN_NAMES_64 ORTOLAN_NAMES_48 ", " "%24, %25, %26, %27, %28, %29, %30, %31"
#define ORTOLAN_SUMS_64 ORTOLAN_SUMS_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define ORTOLAN_NAMES_80 ORTOLAN_NAMES_64 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define ORTOLAN_SUMS_80 ORTOLAN_SUMS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define ORTOLAN_NAMES_96 ORTOLAN_NAMES_80 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define ORTOLAN_SUMS_96 ORTOLAN_SUMS_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define ORTOLAN_NAMES_112 ORTOLAN_NAMES_96 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define ORTOLAN_SUMS_112 ORTOLAN_SUMS_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define ORTOLAN_NAMES_128 ORTOLAN_NAMES_112 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define ORTOLAN_SUMS_128 ORTOLAN_SUMS_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define ORTOLAN_NAMES_144 ORTOLAN_NAMES_128 ", " "%64, %65, %66, %67, %68, %69, %70, %71"
#define ORTOLAN_SUMS_144 ORTOLAN_SUMS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define ORTOLAN_NAMES_160 ORTOLAN_NAMES_144 ", " "%72, %73, %74, %75, %76, %77, %78, %79"
#define ORTOLAN_SUMS_160 ORTOLAN_SUMS_144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define ORTOLAN_PRODUCT(ELEMENT, TYPE, COLUMNS, A, B, P, A1, A2, A3, BR, PR)                                          \
  template <>                                                                                                      \
  struct ColumnsProduct<ELEMENT, COLUMNS> {                                                                        \
    static __device__ __forceinline__ void add(float (&d)[kMostColumns / 2], uint64_t a, uint64_t b, int more) {    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS       \
                   "k16.f32." TYPE "." TYPE " {" ORTOLAN_NAMES_##COLUMNS "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}\n"  \
                   : ORTOLAN_SUMS_##COLUMNS                                                                        \
                   : "l"(a), "l"(b), "r"(more));                                                                   \
    }                                                                                                              \
    static __device__ __forceinline__ void add(float (&d)[kMostColumns / 2], const uint32_t (&a)[4], uint64_t b,    \
                                               int more) {                                                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #PR ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS      \
                   "k16.f32." TYPE "." TYPE " {" ORTOLAN_NAMES_##COLUMNS "}, {%" #A ", %" #A1 ", %" #A2 ", %" #A3    \
                   "}, %" #BR ", p, 1, 1, 0;\n}\n"                                                                 \
                   : ORTOLAN_SUMS_##COLUMNS                                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));                               \
    }                                                                                                              \
  };
ORTOLAN_PRODUCT(__nv_bfloat16, "bf16", 16, 8, 9, 10, 9, 10, 11, 12, 13)
ORTOLAN_PRODUCT(__nv_bfloat16, "bf16", 32, 16, 17, 18, 17, 18, 19, 20, 21)
ORTOLAN_PRODUCT(__nv_bfloat16, "bf16", 48, 24, 25, 26, 25, 26, 27, 28, 29)
ORTOLAN_PRODUCT(__nv_bfloat16, "bf16", 64, 32, 33, 34, 33, 34, 35, 36, 37)
ORTOLAN_PRODUCT(__nv_bfloat16, "bf16", 80, 40, 41, 42, 41, 42, 43, 44, 45)
ORTOLAN_PRODUCT(__nv_bfloat16, "bf16", 96, 48, 49, 50, 49, 50, 51, 52, 53)
ORTOLAN_PRODUCT(__nv_bfloat16, "bf16", 112, 56, 57, 58, 57, 58, 59, 60, 61)
ORTOLAN_PRODUCT(__nv_bfloat16, "bf16", 128, 64, 65, 66, 65, 66, 67, 68, 69)
ORTOLAN_PRODUCT(__nv_bfloat16, "bf16", 144, 72, 73, 74, 73, 74, 75, 76, 77)
ORTOLAN_PRODUCT(__nv_bfloat16, "bf16", 160, 80, 81, 82, 81, 82, 83, 84, 85)
ORTOLAN_PRODUCT(__half, "f16", 16, 8, 9, 10, 9, 10, 11, 12, 13)
ORTOLAN_PRODUCT(__half, "f16", 32, 16, 17, 18, 17, 18, 19, 20, 21)
ORTOLAN_PRODUCT(__half, "f16", 48, 24, 25, 26, 25, 26, 27, 28, 29)
ORTOLAN_PRODUCT(__half, "f16", 64, 32, 33, 34, 33, 34, 35, 36, 37)
ORTOLAN_PRODUCT(__half, "f16", 80, 40, 41, 42, 41, 42, 43, 44, 45)
ORTOLAN_PRODUCT(__half, "f16", 96, 48, 49, 50, 49, 50, 51, 52, 53)
ORTOLAN_PRODUCT(__half, "f16", 112, 56, 57, 58, 57, 58, 59, 60, 61)
ORTOLAN_PRODUCT(__half, "f16", 128, 64, 65, 66, 65, 66, 67, 68, 69)
ORTOLAN_PRODUCT(__half, "f16", 144, 72, 73, 74, 73, 74, 75, 76, 77)
ORTOLAN_PRODUCT(__half, "f16", 160, 80, 81, 82, 81, 82, 83, 84, 85)
#undef ORTOLAN_PRODUCT
#undef ORTOLAN_NAMES_16
#undef ORTOLAN_SUMS_16
#undef ORTOLAN_NAMES_32
#undef ORTOLAN_SUMS_32
#undef ORTOLAN_NAMES_48
#undef ORTOLAN_SUMS_48
#undef ORTOLAN_NAMES_64
#undef ORTOLAN_SUMS_64
#undef ORTOLAN_NAMES_80
#undef ORTOLAN_SUMS_80
#undef ORTOLAN_NAMES_96
#undef ORTOLAN_SUMS_96
#undef ORTOLAN_NAMES_112
#undef ORTOLAN_SUMS_112
#undef ORTOLAN_NAMES_128
#undef ORTOLAN_SUMS_128
#undef ORTOLAN_NAMES_144
#undef ORTOLAN_SUMS_144
#undef ORTOLAN_NAMES_160
#undef ORTOLAN_SUMS_160
// clang-format on

}  // namespace ortolan::cuda
