// Adds up what the experts of each token give.
#include "gate_product.cuh"
#include "instances.h"
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 256;

// y = residual + the sum of a token's products, in the order of its choices; a thread has four features.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ ExpertStep p, const __grid_constant__ ExpertScratch scratch) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t place = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * 4;
  if (place >= p.num_tokens * p.hidden_size) return;
  const int64_t token = place / p.hidden_size, column = place % p.hidden_size;
  float y[4] = {};
  for (int64_t pair = token * p.top_k; pair < (token + 1) * p.top_k; ++pair) {
    if (!exists(p, p.experts[pair])) continue;
    const float4 product = *reinterpret_cast<const float4*>(scratch.products + pair * p.hidden_size + column);
    const float weight = p.weights[pair];
    y[0] += weight * product.x;
    y[1] += weight * product.y;
    y[2] += weight * product.z;
    y[3] += weight * product.w;
  }
  if (p.residual) {
    const uint2 residual = *reinterpret_cast<const uint2*>(static_cast<const Element*>(p.residual) + place);
    const float2 low = Half<Element>::unpack(residual.x), high = Half<Element>::unpack(residual.y);
    y[0] += low.x;
    y[1] += low.y;
    y[2] += high.x;
    y[3] += high.y;
  }
  *reinterpret_cast<uint2*>(static_cast<Element*>(p.y) + place) =
      make_uint2(Half<Element>::pack(y[0], y[1]), Half<Element>::pack(y[2], y[3]));
}

}  // namespace

cudaError_t launch_combine(const ExpertStep& p, const ExpertScratch& scratch, const Launch& launch) {
  const dim3 blocks(static_cast<unsigned>(divide_up(p.num_tokens * p.hidden_size / 4, kThreads)));
  return with_half_element(p.element, [&]<typename Element>() {
    return launch_overlapped(combine_kernel<Element>, blocks, dim3(kThreads), 0, launch, p, scratch);
  });
}

}  // namespace ortolan::cuda
