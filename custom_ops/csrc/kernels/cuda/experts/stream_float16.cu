#include "stream_launch.cuh"

namespace ortolan::cuda {

template cudaError_t launch_expert_streams<__half>(const LowBitExpertsParams&, const ExpertScratch&, bool,
                                                   const Launch&);

}  // namespace ortolan::cuda
