#include "pairs.cuh"

namespace ortolan::cuda {

template cudaError_t launch_pair_experts<float>(const MoeExpertsParams&, const ExpertScratch&, const Launch&);

}  // namespace ortolan::cuda
