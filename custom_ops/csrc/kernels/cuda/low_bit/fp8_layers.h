// Linear layers of fp8 whose inputs are rounded to fp8, too.
#pragma once

#include "kernels/cuda/common/kernels.h"
#include "kernels/low_bit_params.h"

namespace ortolan::cuda {

size_t fp8_linear_workspace(const LowBitLinearParams& p, const Device& device);
cudaError_t fp8_linear(const LowBitLinearParams& p, const Launch& launch);

}  // namespace ortolan::cuda
