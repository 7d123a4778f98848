// What the CUDA kernels of a stream share, as they run there in turn: scratch memory, counters and a cuBLAS
// handle.
//
// A buffer that a captured graph points into is kept until the last kernel is gone, also where a larger one
// has taken its place; others are freed once the stream has passed their last use. ONNX Runtime runs a graph
// before it captures it, so nothing is allocated during a capture. (KernelContext_GetScratchBuffer is no
// help: what it returns is never freed.)
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/linear/cublas.h"

namespace ortolan {

// Keeps all workspaces and handles alive while any kernel holds the result.
std::shared_ptr<void> acquire_workspaces();

// Gives a launch at least launch.workspace_bytes on the current device for work on its stream, and counters;
// neither where it asks for 0 bytes. Counters are zeroed once, and lie apart from the scratch memory, which
// any kernel may write to.
cudaError_t stream_workspace(cuda::Launch& launch);

// The stream's handle on the current device, made on the first call; null where no cuBLAS is to be found, or
// where the first call falls into a graph capture.
cudaError_t stream_cublas(cudaStream_t stream, cuda::Cublas** cublas);

}  // namespace ortolan
