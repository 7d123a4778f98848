#include "gemv_launch.cuh"

namespace ortolan::cuda {

template cudaError_t launch_gemvs<float>(const FusedLinearParams&, const Launch&);

}  // namespace ortolan::cuda
