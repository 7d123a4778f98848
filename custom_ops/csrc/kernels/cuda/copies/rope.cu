// RopeAngles: the angles of RoPE, once for all layers that share a rope.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 128;

// One thread per token and pair. The library functions, not the fast ones: angles reach the context's length.
__global__ void __launch_bounds__(kThreads) rope_angles_kernel(const RopeAnglesParams p) {
  launch_dependents();
  const int64_t place = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (place >= p.num_tokens * p.rotary_pairs) return;
  wait_for_previous_kernel();
  const float position = static_cast<float>(p.positions[place / p.rotary_pairs]);
  const float angle = position * p.inv_freq[place % p.rotary_pairs];
  p.cosine[place] = cosf(angle) * p.factor;
  p.sine[place] = sinf(angle) * p.factor;
}

}  // namespace

cudaError_t rope_angles(const RopeAnglesParams& p, const Launch& launch) {
  const int64_t count = p.num_tokens * p.rotary_pairs;
  if (count == 0) return cudaSuccess;
  return launch_overlapped(rope_angles_kernel, dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)),
                           dim3(kThreads), 0, launch, p);
}

}  // namespace ortolan::cuda
