#include "gemv_launch.cuh"

namespace ortolan::cuda {

template cudaError_t launch_gemvs<__half>(const FusedLinearParams&, const Launch&);
template cudaError_t launch_chains<__half>(const FusedLinearParams&, const Launch&);

}  // namespace ortolan::cuda
