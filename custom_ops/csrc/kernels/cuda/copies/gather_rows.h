// The rows that the head reads: the last of each sequence.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/common/kernels.h"
#include "kernels/fused_params.h"

namespace ortolan::cuda {

cudaError_t last_rows(const LastRowsParams& params, const Launch& launch);

}  // namespace ortolan::cuda
