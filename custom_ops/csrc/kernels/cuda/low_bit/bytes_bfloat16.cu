#include "bytes_launch.cuh"

namespace ortolan::cuda {

template cudaError_t launch_low_bit_bytes<__nv_bfloat16>(const LowBitLinearParams&, const Launch&);

}  // namespace ortolan::cuda
