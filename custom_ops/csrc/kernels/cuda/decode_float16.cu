#include "decode_launch.cuh"

namespace ortolan::cuda {

ORTOLAN_INSTANTIATE_DECODE(__half, 64, 1)
ORTOLAN_INSTANTIATE_DECODE(__half, 64, 2)
ORTOLAN_INSTANTIATE_DECODE(__half, 128, 1)
ORTOLAN_INSTANTIATE_DECODE(__half, 128, 2)
ORTOLAN_INSTANTIATE_DECODE(__half, 256, 1)
ORTOLAN_INSTANTIATE_DECODE(__half, 512, 1)

}  // namespace ortolan::cuda
