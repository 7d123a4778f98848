#include "gated_sm90_launch.cuh"

namespace ortolan::cuda {

template cudaError_t launch_gated_sm90<__nv_bfloat16>(const FusedLinearParams&, const Launch&);

}  // namespace ortolan::cuda
