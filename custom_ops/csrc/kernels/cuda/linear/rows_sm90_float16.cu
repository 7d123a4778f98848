#include "rows_sm90_launch.cuh"

namespace ortolan::cuda {

template cudaError_t launch_rows_sm90<__half, true, false>(const FusedLinearParams&, const Launch&);
template cudaError_t launch_rows_sm90<__half, true, true>(const FusedLinearParams&, const Launch&);
template cudaError_t launch_rows_sm90<__half, false, true>(const FusedLinearParams&, const Launch&);

}  // namespace ortolan::cuda
