#include "cuda_operators.h"

#include <string>

namespace ortolan {

void check_cuda(const NodeInfo& node, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error("ortolan." + std::string(node.schema->name) + " node '" + node.name +
                           "': CUDA reports " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

cuda::Launch make_launch(const Context& context) {
  cuda::Launch launch;
  launch.stream = static_cast<cudaStream_t>(context.gpu_stream());
  check_cuda(context.node(), cuda::current_device(launch.device));
  return launch;
}

}  // namespace ortolan
