#include "sm90_launch.cuh"

namespace ortolan::cuda {

template cudaError_t launch_sm90_product<__half>(const MoeExpertsParams&, const ExpertScratch&, bool,
                                                 const Launch&);

}  // namespace ortolan::cuda
