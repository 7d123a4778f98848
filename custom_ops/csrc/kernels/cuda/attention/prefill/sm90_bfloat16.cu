#include "sm90_launch.cuh"

namespace ortolan::cuda {

ORTOLAN_INSTANTIATE_SM90_PREFILL(__nv_bfloat16, 64, 64)
ORTOLAN_INSTANTIATE_SM90_PREFILL(__nv_bfloat16, 64, 128)
ORTOLAN_INSTANTIATE_SM90_PREFILL(__nv_bfloat16, 128, 64)
ORTOLAN_INSTANTIATE_SM90_PREFILL(__nv_bfloat16, 128, 128)
ORTOLAN_INSTANTIATE_SM90_PREFILL(__nv_bfloat16, 256, 80)

}  // namespace ortolan::cuda
