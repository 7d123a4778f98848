// How a CUDA kernel becomes an operator's.
#pragma once

#include "cuda_workspace.h"
#include "operators.generated.h"
#include "operators.h"

namespace ortolan {

// Throws what CUDA reports. The thread forgets an error that is reported here: nothing later takes it for its
// own.
void check_cuda(const NodeInfo& node, cudaError_t error);

// The call's stream, and the device that is current.
cuda::Launch make_launch(const Context& context);

// Enqueues the kernel on the call's stream. kWorkspace: bytes of scratch memory that it needs, if it does.
template <typename Op, auto kKernel, auto kWorkspace = nullptr>
OperatorKernel cuda_operator() {
  return {.schema = &Op::kSchema,
          .read_attributes = read_attributes<Op>,
          .compute =
              [](const NodeInfo& node, OrtKernelContext* context) {
                const Call<Op> call(node, context);
                typename Op::Params params = read_params(call);
                cuda::Launch launch = make_launch(call);
                if constexpr (requires { params.cublas; })
                  check_cuda(node, stream_cublas(launch.stream, &params.cublas));
                if constexpr (kWorkspace != nullptr) {
                  launch.workspace_bytes = kWorkspace(params, launch.device);
                  check_cuda(node, stream_workspace(launch));
                }
                check_cuda(node, kKernel(params, launch));
              },
          .reused_ports = reused_ports<Op>,
          .acquire_resources = acquire_workspaces};
}

}  // namespace ortolan
