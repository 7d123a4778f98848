#include "launch.cuh"

namespace ortolan::cuda {

ORTOLAN_COMBINE_DECODE(extern, __nv_bfloat16, 64)
ORTOLAN_COMBINE_DECODE(extern, __nv_bfloat16, 128)
ORTOLAN_COMBINE_DECODE(extern, __nv_bfloat16, 256)
ORTOLAN_COMBINE_DECODE(extern, __half, 64)
ORTOLAN_COMBINE_DECODE(extern, __half, 128)
ORTOLAN_COMBINE_DECODE(extern, __half, 256)

ORTOLAN_INSTANTIATE_DECODE(CodeRows, Float8Code, 64, 1)
ORTOLAN_INSTANTIATE_DECODE(CodeRows, Float8Code, 64, 2)
ORTOLAN_INSTANTIATE_DECODE(CodeRows, Float8Code, 128, 1)
ORTOLAN_INSTANTIATE_DECODE(CodeRows, Float8Code, 128, 2)
ORTOLAN_INSTANTIATE_DECODE(CodeRows, Float8Code, 256, 1)
ORTOLAN_INSTANTIATE_DECODE(CodeRows, Float8Code, 256, 2)

}  // namespace ortolan::cuda
