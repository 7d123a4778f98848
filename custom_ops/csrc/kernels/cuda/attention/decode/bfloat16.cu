#include "launch.cuh"
#include "sm90_launch.cuh"

namespace ortolan::cuda {

ORTOLAN_INSTANTIATE_DECODE(DenseRows, __nv_bfloat16, 64, 1)
ORTOLAN_INSTANTIATE_DECODE(DenseRows, __nv_bfloat16, 64, 2)
ORTOLAN_INSTANTIATE_DECODE(DenseRows, __nv_bfloat16, 128, 1)
ORTOLAN_INSTANTIATE_DECODE(DenseRows, __nv_bfloat16, 128, 2)
ORTOLAN_INSTANTIATE_DECODE(DenseRows, __nv_bfloat16, 256, 1)
ORTOLAN_INSTANTIATE_DECODE(DenseRows, __nv_bfloat16, 256, 2)
ORTOLAN_INSTANTIATE_DECODE(DenseRows, __nv_bfloat16, 512, 1)
ORTOLAN_COMBINE_DECODE(, __nv_bfloat16, 64)
ORTOLAN_COMBINE_DECODE(, __nv_bfloat16, 128)
ORTOLAN_COMBINE_DECODE(, __nv_bfloat16, 256)
ORTOLAN_INSTANTIATE_SM90_DECODE(__nv_bfloat16, 128)
ORTOLAN_INSTANTIATE_SM90_DECODE(__nv_bfloat16, 256)
ORTOLAN_INSTANTIATE_SM90_DECODE(__nv_bfloat16, 512)

}  // namespace ortolan::cuda
