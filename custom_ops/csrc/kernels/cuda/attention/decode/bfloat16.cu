#include "launch.cuh"

namespace ortolan::cuda {

ORTOLAN_INSTANTIATE_DECODE(__nv_bfloat16, 64, 1)
ORTOLAN_INSTANTIATE_DECODE(__nv_bfloat16, 64, 2)
ORTOLAN_INSTANTIATE_DECODE(__nv_bfloat16, 128, 1)
ORTOLAN_INSTANTIATE_DECODE(__nv_bfloat16, 128, 2)
ORTOLAN_INSTANTIATE_DECODE(__nv_bfloat16, 256, 1)
ORTOLAN_INSTANTIATE_DECODE(__nv_bfloat16, 256, 2)
ORTOLAN_INSTANTIATE_DECODE(__nv_bfloat16, 512, 1)

}  // namespace ortolan::cuda
