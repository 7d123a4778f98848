#include "gemv_launch.cuh"

namespace ortolan::cuda {

template cudaError_t launch_gemvs<__nv_bfloat16>(const FusedLinearParams&, const Launch&);
template cudaError_t launch_chains<__nv_bfloat16>(const FusedLinearParams&, const Launch&);

}  // namespace ortolan::cuda
