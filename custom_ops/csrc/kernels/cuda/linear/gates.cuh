// The activations of gated layers.
#pragma once

#include "kernels/fused_params.h"

namespace ortolan::cuda {

__device__ __forceinline__ float activate(GatedActivation activation, float x) {
  switch (activation) {
    case GatedActivation::kSiluMul:
      return x / (1.0f + expf(-x));
    case GatedActivation::kGeluMul:
      return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case GatedActivation::kGeluTanhMul:
      return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    default:
      return x;
  }
}

// The same for results that are rounded to 16 bits: exponential and division to 2^-20.
__device__ __forceinline__ float activate_nearly(GatedActivation activation, float x) {
  const auto sigmoid_product = [](float x, float z) { return __fdividef(x, 1.0f + __expf(-z)); };
  if (activation == GatedActivation::kSiluMul) return sigmoid_product(x, x);
  if (activation == GatedActivation::kGeluTanhMul)  // (1 + tanh(u)) / 2 = sigmoid(2 u)
    return sigmoid_product(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
  return activate(activation, x);
}

}  // namespace ortolan::cuda
