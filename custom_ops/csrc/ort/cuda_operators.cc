#include <string>

#include "cuda_workspace.h"
#include "fused_operators.h"
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/copies/gather_rows.h"
#include "kernels/cuda/copies/qkv.h"
#include "kernels/cuda/copies/rope.h"
#include "kernels/cuda/linear/linear.h"
#include "operators.h"
#include "read_params.h"

namespace ortolan {
namespace {

// The thread forgets an error that is reported here: nothing later takes it for its own.
void check_cuda(const Context& context, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  const NodeInfo& node = context.node();
  throw std::runtime_error("ortolan." + std::string(node.schema->name) + " node '" + node.name +
                           "': CUDA reports " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

cuda::Launch make_launch(const Context& context) {
  cuda::Launch launch;
  launch.stream = static_cast<cudaStream_t>(context.gpu_stream());
  check_cuda(context, cuda::current_device(launch.device));
  return launch;
}

// Reads one call's parameters and enqueues the kernel on the call's stream.
template <auto kRead, auto kKernel>
void compute(const Context& context) {
  const auto params = kRead(context);
  check_cuda(context, kKernel(params, make_launch(context)));
}

// The same for kernels that need scratch memory.
template <auto kRead, auto kKernel, auto kWorkspace>
void compute_with_workspace(const Context& context) {
  const auto params = kRead(context);
  cuda::Launch launch = make_launch(context);
  launch.workspace_bytes = kWorkspace(params, launch.device);
  check_cuda(context, stream_workspace(launch));
  check_cuda(context, kKernel(params, launch));
}

FusedLinearParams read_fused_linear_with_cublas(const Context& context) {
  FusedLinearParams params = read_fused_linear(context);
  check_cuda(context, stream_cublas(static_cast<cudaStream_t>(context.gpu_stream()), &params.cublas));
  return params;
}

}  // namespace

const Computes& cuda_computes() {
  static constexpr Computes computes{
      .ring_kv_append = compute<read_ring_kv_append, cuda::ring_kv_append>,
      .swa_attention =
          compute_with_workspace<read_swa_attention, cuda::swa_attention, cuda::swa_attention_workspace>,
      .snapkv_capture = compute<read_snapkv_capture, cuda::snapkv_capture>,
      .snapkv_score =
          compute_with_workspace<read_snapkv_score, cuda::snapkv_score, cuda::snapkv_score_workspace>,
      .kv_select = compute<read_kv_select, cuda::kv_select>,
      .kv_compact = compute_with_workspace<read_kv_compact, cuda::kv_compact, cuda::kv_compact_workspace>,
      .fused_linear = compute_with_workspace<read_fused_linear_with_cublas, cuda::fused_linear,
                                             cuda::fused_linear_workspace>,
      .qkv_rope_append = compute<read_qkv_rope_append, cuda::qkv_rope_append>,
      .rope_angles = compute<read_rope_angles, cuda::rope_angles>,
      .last_rows = compute<read_last_rows, cuda::last_rows>,
      .rms_norm_add = compute<read_rms_norm_add, cuda::rms_norm_add>,
  };
  return computes;
}

Resources acquire_resources(Provider provider) {
  return provider == Provider::kCuda ? acquire_workspaces() : nullptr;
}

}  // namespace ortolan
