// Matrix products with what surrounds them in a decoder layer: RMS norm before, bias, gate and residual
// after.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/cuda/common/kernels.h"
#include "kernels/fused_params.h"

namespace ortolan::cuda {

cudaError_t fused_linear(const FusedLinearParams& params, const Launch& launch);
size_t fused_linear_workspace(const FusedLinearParams& params, const Device& device);

cudaError_t rms_norm_add(const RmsNormAddParams& params, const Launch& launch);

}  // namespace ortolan::cuda
