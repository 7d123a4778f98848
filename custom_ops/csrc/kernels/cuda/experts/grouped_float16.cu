#include "grouped.cuh"

namespace ortolan::cuda {

template cudaError_t launch_grouped_experts<__half>(const MoeExpertsParams&, const ExpertScratch&,
                                                    const Launch&);

}  // namespace ortolan::cuda
