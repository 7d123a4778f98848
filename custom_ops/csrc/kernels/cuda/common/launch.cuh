// Launches kernels, by themselves or such that one may start before the one in front of it has ended.
//
// Every launch returns its own error. The thread's last error (cudaGetLastError) may be that of an earlier
// call, which another step has answered for already: nothing reads it.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <utility>

#include "kernels.h"

namespace ortolan::cuda {

constexpr int kMaxCluster = 16;  // blocks; what every device has is 8

// Where a device has no place in a table of this size, what the table would hold is asked for again.
constexpr int kKnownDevices = 32;

// Lets the blocks of a kernel have all the dynamic shared memory that the device can give them. The limit is
// one value for all threads of the process: what one launch needs could be too little for another thread's.
template <auto kKernel>
cudaError_t allow_shared_memory(const Device& device) {
  static std::atomic<bool> allowed[kKnownDevices];
  const bool has_place = device.ordinal < kKnownDevices;
  if (has_place && allowed[device.ordinal]) return cudaSuccess;
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, kKernel);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               device.shared_bytes_per_block - static_cast<int>(attributes.sharedSizeBytes));
  if (has_place && error == cudaSuccess) allowed[device.ordinal] = true;
  return error;
}

// For kernels that wait for nothing: they start when the one in front has ended.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_alone(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                         Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

// The kernel must call wait_for_previous_kernel() before it touches what an earlier kernel writes or reads.
// It may call launch_dependents() at its start: whoever it lets start waits in the same way. `cluster`
// consecutive blocks form a cluster; more than one needs compute capability 9.0. All ask for the same
// division of L1 and shared memory: a multiprocessor must be empty to divide them anew, and then no two
// kernels overlap. Source: CUDA programming guide, "Programmatic Dependent Launch" and "Thread Block
// Clusters".
template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 block, unsigned cluster,
                            size_t shared_bytes, const Launch& launch, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[3]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[1].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  attributes[2].id = cudaLaunchAttributeClusterDimension;
  attributes[2].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = launch.device.compute_capability < 90 ? 0 : cluster == 1 ? 2 : 3;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_overlapped(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                              const Launch& launch, Arguments&&... arguments) {
  return launch_clusters(kernel, grid, block, 1, shared_bytes, launch, std::forward<Arguments>(arguments)...);
}

// Clusters of so many blocks that the current device holds at once: some of its multiprocessors may not reach
// each other.
template <typename... Parameters>
int count_clusters(void (*kernel)(Parameters...), dim3 block, unsigned cluster, size_t shared_bytes) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = cluster;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess) return clusters;
  cudaGetLastError();  // leaves none behind: the answer stands for it
  return 0;
}

// The same, asked of the driver once for each kernel, device and size of cluster. For kernels whose answer is
// the same for every block and shared memory that they are launched with.
template <auto kKernel>
int resident_clusters(dim3 block, unsigned cluster, size_t shared_bytes, const Device& device) {
  static std::atomic<int> known[kKnownDevices][kMaxCluster + 1];  // one more than the answer, or 0
  if (device.ordinal >= kKnownDevices) return 0;
  std::atomic<int>& answer = known[device.ordinal][cluster];
  if (!answer) answer = count_clusters(kKernel, block, cluster, shared_bytes) + 1;
  return answer - 1;
}

}  // namespace ortolan::cuda
