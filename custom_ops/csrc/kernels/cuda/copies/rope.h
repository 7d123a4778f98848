// The angles of RoPE, once for all layers that share a rope.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/common/kernels.h"
#include "kernels/fused_params.h"

namespace ortolan::cuda {

cudaError_t rope_angles(const RopeAnglesParams& params, const Launch& launch);

}  // namespace ortolan::cuda
