// Launches a kernel that may start before the one in front of it has ended.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "kernels.h"

namespace ortolan::cuda {

// The kernel must call wait_for_previous_kernel() before it touches what an earlier kernel writes or reads.
// It may call launch_dependents() at its start: whoever it lets start waits in the same way.
// Source: CUDA programming guide, "Programmatic Dependent Launch".
// `cluster`: blocks of each of the grid's clusters; above 1 from compute capability 9.0 on.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                            unsigned cluster, const Launch& launch, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = launch.device.compute_capability >= 90 ? (cluster > 1 ? 2 : 1) : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_overlapped(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                              const Launch& launch, Arguments&&... arguments) {
  return launch_clusters(kernel, grid, block, shared_bytes, 1, launch, std::forward<Arguments>(arguments)...);
}

}  // namespace ortolan::cuda
