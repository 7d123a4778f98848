#include "launch.cuh"
#include "sm90_launch.cuh"

namespace ortolan::cuda {

ORTOLAN_INSTANTIATE_SCORE(__half, 64)
ORTOLAN_INSTANTIATE_SCORE(__half, 128)
ORTOLAN_INSTANTIATE_SCORE(__half, 256)
ORTOLAN_INSTANTIATE_SCORE(__half, 512)

ORTOLAN_INSTANTIATE_SCORE_SM90(__half, 64)
ORTOLAN_INSTANTIATE_SCORE_SM90(__half, 128)

}  // namespace ortolan::cuda
