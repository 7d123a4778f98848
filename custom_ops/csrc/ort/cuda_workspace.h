// What the CUDA kernels of a stream share, as they run there in turn: scratch memory and a cuBLAS handle.
//
// A buffer that grew is kept until the last kernel is gone: a captured graph may still point into the smaller
// one. ONNX Runtime runs a graph before it captures it, so nothing is allocated during a capture.
// (KernelContext_GetScratchBuffer is no help: what it returns is never freed.)
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "../kernels/cuda/cublas.h"

namespace ortolan {

// Keeps all workspaces and handles alive while any kernel holds the result.
std::shared_ptr<void> acquire_workspaces();

// At least `bytes` on the current device for work on `stream`, 256-byte aligned; null for 0 bytes.
cudaError_t stream_workspace(cudaStream_t stream, size_t bytes, void** workspace);

// The stream's handle on the current device, made on the first call; null where no cuBLAS is to be found, or
// where the first call falls into a graph capture.
cudaError_t stream_cublas(cudaStream_t stream, cuda::Cublas** cublas);

}  // namespace ortolan
