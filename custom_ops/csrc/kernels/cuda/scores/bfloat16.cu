#include "launch.cuh"
#include "sm90_launch.cuh"

namespace ortolan::cuda {

ORTOLAN_INSTANTIATE_SCORE(__nv_bfloat16, 64)
ORTOLAN_INSTANTIATE_SCORE(__nv_bfloat16, 128)
ORTOLAN_INSTANTIATE_SCORE(__nv_bfloat16, 256)
ORTOLAN_INSTANTIATE_SCORE(__nv_bfloat16, 512)

ORTOLAN_INSTANTIATE_SCORE_SM90(__nv_bfloat16, 64)
ORTOLAN_INSTANTIATE_SCORE_SM90(__nv_bfloat16, 128)

}  // namespace ortolan::cuda
