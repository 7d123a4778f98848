// wgmma of 64 rows and 16, 32 or 64 columns, both operands in shared memory: sum[64 x columns] (+)=
// a[64 x 16] * b[16 x columns], b contiguous along the axis that is summed over. `products`: a is, too
// (keys); `sums`: a is contiguous along its rows (columns of values).
#pragma once

#include "wgmma.cuh"

namespace ortolan::cuda {

template <typename Element, int kColumns>
struct FewColumns;

// clang-format off
#define ORTOLAN_FEW_SUMS_16 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define ORTOLAN_FEW_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define ORTOLAN_FEW_SUMS_32 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define ORTOLAN_FEW_NAMES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ORTOLAN_FEW_SUMS_64 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define ORTOLAN_FEW_NAMES_64 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ORTOLAN_FEW_PRODUCT(TYPE, COLUMNS, TURN, A, B, P)                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS       \
               "k16.f32." TYPE "." TYPE " {" ORTOLAN_FEW_NAMES_##COLUMNS "}, %" #A ", %" #B ", p, 1, 1, " TURN    \
               ", 0;\n}\n"                                                                                   \
               : ORTOLAN_FEW_SUMS_##COLUMNS                                                                    \
               : "l"(a), "l"(b), "r"(more))
#define ORTOLAN_FEW_COLUMNS(ELEMENT, TYPE, COLUMNS, A, B, P)                                                   \
  template <>                                                                                                  \
  struct FewColumns<ELEMENT, COLUMNS> {                                                                        \
    static __device__ __forceinline__ void products(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b, int more) { \
      ORTOLAN_FEW_PRODUCT(TYPE, COLUMNS, "0", A, B, P);                                                        \
    }                                                                                                          \
    static __device__ __forceinline__ void sums(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b, int more) {     \
      ORTOLAN_FEW_PRODUCT(TYPE, COLUMNS, "1", A, B, P);                                                        \
    }                                                                                                          \
  };
ORTOLAN_FEW_COLUMNS(__nv_bfloat16, "bf16", 16, 8, 9, 10)
ORTOLAN_FEW_COLUMNS(__nv_bfloat16, "bf16", 32, 16, 17, 18)
ORTOLAN_FEW_COLUMNS(__nv_bfloat16, "bf16", 64, 32, 33, 34)
ORTOLAN_FEW_COLUMNS(__half, "f16", 16, 8, 9, 10)
ORTOLAN_FEW_COLUMNS(__half, "f16", 32, 16, 17, 18)
ORTOLAN_FEW_COLUMNS(__half, "f16", 64, 32, 33, 34)
#undef ORTOLAN_FEW_COLUMNS
#undef ORTOLAN_FEW_PRODUCT
#undef ORTOLAN_FEW_NAMES_16
#undef ORTOLAN_FEW_SUMS_16
#undef ORTOLAN_FEW_NAMES_64
#undef ORTOLAN_FEW_SUMS_64
#undef ORTOLAN_FEW_NAMES_32
#undef ORTOLAN_FEW_SUMS_32
// clang-format on

}  // namespace ortolan::cuda
