#include "launch.cuh"

namespace ortolan::cuda {

ORTOLAN_INSTANTIATE_SCORE(float, 64)
ORTOLAN_INSTANTIATE_SCORE(float, 128)
ORTOLAN_INSTANTIATE_SCORE(float, 256)
ORTOLAN_INSTANTIATE_SCORE(float, 512)

}  // namespace ortolan::cuda
