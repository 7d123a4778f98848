// The angles of RoPE, once for all layers that share a rope.
#pragma once

#include <cuda_runtime_api.h>

#include "../fused_params.h"
#include "kernels.h"

namespace ortolan::cuda {

cudaError_t rope_angles(const RopeAnglesParams& params, const Launch& launch);

}  // namespace ortolan::cuda
