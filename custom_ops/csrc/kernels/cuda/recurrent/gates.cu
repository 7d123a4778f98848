// DeltaGates: a thread per token and head.
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 128;

template <typename Element>
__global__ void __launch_bounds__(kThreads) delta_gates_kernel(const __grid_constant__ DeltaGatesParams p) {
  launch_dependents();
  const int64_t place = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t token = place / p.num_heads, head = place % p.num_heads;
  if (token >= p.num_tokens)
    return wait_for_previous_kernel();  // who comes next relies on all before this one
  const float rate = expf(to_float(static_cast<const Element*>(p.a_log)[head]));
  const float bias = to_float(static_cast<const Element*>(p.dt_bias)[head]);
  wait_for_previous_kernel();
  const float d = to_float(static_cast<const Element*>(p.decay_rows)[token * p.decay_stride + head]) + bias;
  const float b = to_float(static_cast<const Element*>(p.beta_rows)[token * p.beta_stride + head]);
  p.decay[place] = -rate * (d > 20.0f ? d : log1pf(expf(d)));
  p.beta[place] = p.beta_scale / (1.0f + expf(-b));
}

}  // namespace

cudaError_t delta_gates(const DeltaGatesParams& p, const Launch& launch) {
  if (p.num_tokens == 0 || p.num_heads == 0) return cudaSuccess;
  const dim3 blocks(static_cast<unsigned>((p.num_tokens * p.num_heads + kThreads - 1) / kThreads));
  return with_element(p.element, [&]<typename Element>() {
    return launch_overlapped(delta_gates_kernel<Element>, blocks, dim3(kThreads), 0, launch, p);
  });
}

}  // namespace ortolan::cuda
