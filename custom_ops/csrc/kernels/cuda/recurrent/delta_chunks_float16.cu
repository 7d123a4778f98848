#include "delta_chunks_launch.cuh"

namespace ortolan::cuda {

template cudaError_t launch_delta_chunks<__half>(const GatedDeltaRuleParams&, const Launch&);

}  // namespace ortolan::cuda
