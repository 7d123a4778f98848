// The activations of gated layers.
#pragma once

#include "../fused_params.h"

namespace ortolan::cuda {

__device__ __forceinline__ float activate(GatedActivation activation, float x) {
  switch (activation) {
    case GatedActivation::kSilu:
      return x / (1.0f + expf(-x));
    case GatedActivation::kGelu:
      return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case GatedActivation::kGeluTanh:
      return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    default:
      return x;
  }
}

}  // namespace ortolan::cuda
