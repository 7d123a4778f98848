#include "rows_sm90_launch.cuh"

namespace ortolan::cuda {

template cudaError_t launch_rows_sm90<__nv_bfloat16, true, false>(const FusedLinearParams&, const Launch&);
template cudaError_t launch_rows_sm90<__nv_bfloat16, true, true>(const FusedLinearParams&, const Launch&);
template cudaError_t launch_rows_sm90<__nv_bfloat16, false, true>(const FusedLinearParams&, const Launch&);

}  // namespace ortolan::cuda
