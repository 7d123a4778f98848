#include "grouped.cuh"

namespace ortolan::cuda {

template cudaError_t launch_grouped_experts<__nv_bfloat16>(const MoeExpertsParams&, const ExpertScratch&,
                                                           const Launch&);

}  // namespace ortolan::cuda
