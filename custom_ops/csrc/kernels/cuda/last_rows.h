// The rows that the head reads: the last of each sequence.
#pragma once

#include <cuda_runtime_api.h>

#include "../fused_params.h"
#include "kernels.h"

namespace ortolan::cuda {

cudaError_t last_rows(const LastRowsParams& params, const Launch& launch);

}  // namespace ortolan::cuda
