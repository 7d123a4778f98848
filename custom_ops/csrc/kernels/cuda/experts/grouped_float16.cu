#include "grouped.cuh"

namespace ortolan::cuda {

template cudaError_t launch_grouped_product<__half>(const MoeExpertsParams&, const ExpertScratch&, bool,
                                                    const Launch&);

}  // namespace ortolan::cuda
