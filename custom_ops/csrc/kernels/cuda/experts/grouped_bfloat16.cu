#include "grouped.cuh"

namespace ortolan::cuda {

template cudaError_t launch_grouped_product<__nv_bfloat16>(const MoeExpertsParams&, const ExpertScratch&,
                                                           bool, const Launch&);

}  // namespace ortolan::cuda
