#include "prefill_sm90_launch.cuh"

namespace ortolan::cuda {

ORTOLAN_INSTANTIATE_SM90_PREFILL(__half, 64, 64)
ORTOLAN_INSTANTIATE_SM90_PREFILL(__half, 64, 128)
ORTOLAN_INSTANTIATE_SM90_PREFILL(__half, 128, 64)
ORTOLAN_INSTANTIATE_SM90_PREFILL(__half, 128, 128)
ORTOLAN_INSTANTIATE_SM90_PREFILL(__half, 256, 80)

}  // namespace ortolan::cuda
