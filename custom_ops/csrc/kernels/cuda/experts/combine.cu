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

// A thread has eight features of a token.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ ExpertStep p, const uint4* products, int pieces) {
  launch_dependents();
  touch_parameters(p, products, pieces);
  wait_for_previous_kernel();
  const int64_t place = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (place >= p.num_tokens * pieces) return;
  const int64_t token = place / pieces, piece = place % pieces;
  float y[8] = {};
  const auto add = [&](const uint4& product, float weight) {
    const uint32_t words[] = {product.x, product.y, product.z, product.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Half<Element>::unpack(words[i]);
      y[2 * i] = fmaf(weight, pair.x, y[2 * i]);
      y[2 * i + 1] = fmaf(weight, pair.y, y[2 * i + 1]);
    }
  };
#pragma unroll 8
  for (int64_t pair = token * p.top_k; pair < (token + 1) * p.top_k; ++pair) {
    const uint4 product = products[pair * pieces + piece];  // whether or not the expert exists
    const float weight = p.weights[pair];
    if (exists(p, p.experts[pair])) add(product, weight);
  }
  if (p.residual) add(static_cast<const uint4*>(p.residual)[place], 1.0f);
  static_cast<uint4*>(p.y)[place] =
      make_uint4(Half<Element>::pack(y[0], y[1]), Half<Element>::pack(y[2], y[3]),
                 Half<Element>::pack(y[4], y[5]), Half<Element>::pack(y[6], y[7]));
}

}  // namespace

cudaError_t launch_combine(const ExpertStep& p, const ExpertScratch& scratch, const Launch& launch) {
  const int64_t pieces = p.hidden_size / 8;
  const dim3 blocks(static_cast<unsigned>(divide_up(p.num_tokens * pieces, kThreads)));
  return with_half_element(p.element, [&]<typename Element>() {
    return launch_overlapped(combine_kernel<Element>, blocks, dim3(kThreads), 0, launch, p,
                             static_cast<const uint4*>(scratch.products), static_cast<int>(pieces));
  });
}

}  // namespace ortolan::cuda
