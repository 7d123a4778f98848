#include "held_launch.cuh"

namespace ortolan::cuda {

template bool launch_low_bit_held<__nv_bfloat16>(const LowBitLinearParams&, const GemvPass&, const Launch&,
                                                 cudaError_t&);

}  // namespace ortolan::cuda
