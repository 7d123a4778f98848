#include "pairs.cuh"

namespace ortolan::cuda {

template cudaError_t launch_pair_experts<__half>(const MoeExpertsParams&, const ExpertScratch&,
                                                 const Launch&);

}  // namespace ortolan::cuda
