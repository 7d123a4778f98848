#include "delta_chunks_launch.cuh"

namespace ortolan::cuda {

template cudaError_t launch_delta_chunks<__nv_bfloat16>(const GatedDeltaRuleParams&, const Launch&);

}  // namespace ortolan::cuda
