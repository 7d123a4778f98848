#include "bytes_launch.cuh"

namespace ortolan::cuda {

template cudaError_t launch_expert_bytes<__half>(const LowBitExpertsParams&, const ExpertScratch&, bool,
                                                 const Launch&);

}  // namespace ortolan::cuda
