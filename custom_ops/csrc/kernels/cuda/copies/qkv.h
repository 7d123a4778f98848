// From the joint projection to attention: head norms, RoPE and the append of keys and values, in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/common/kernels.h"
#include "kernels/qkv_params.h"

namespace ortolan::cuda {

// Heads have a multiple of 8 elements, up to 512; every buffer is aligned to 16 bytes.
cudaError_t qkv_rope_append(const QkvRopeAppendParams& params, const Launch& launch);

}  // namespace ortolan::cuda
