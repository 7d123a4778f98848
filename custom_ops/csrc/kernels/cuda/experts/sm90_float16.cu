#include "sm90_launch.cuh"

namespace ortolan::cuda {

template cudaError_t launch_experts_sm90<__half>(const MoeExpertsParams&, const ExpertScratch&,
                                                 const Launch&);

}  // namespace ortolan::cuda
