// What the kernels of mixtures of experts take: raw pointers, sizes and attributes. No tensor type, no
// runtime.
#pragma once

#include <cstdint>

#include "fused_params.h"

namespace ortolan {

enum class GateScoring { kSoftmax, kSigmoid };

// The K largest of each row: by logit, or by score + selection_bias; of equals, the lower expert.
struct MoeGateParams {
  ElementType element = ElementType::kFloat32;
  int64_t num_tokens = 0;   // T
  int64_t num_experts = 0;  // E
  int64_t top_k = 0;        // K, 1 to E
  GateScoring scoring = GateScoring::kSoftmax;
  bool normalise = false;
  float scale = 1.0f;
  const void* router_logits = nullptr;    // [T, E]
  const float* selection_bias = nullptr;  // [E] or null
  const float* expert_scale = nullptr;    // [E] or null
  int32_t* experts = nullptr;             // [T, K]
  float* weights = nullptr;               // [T, K]
};

// Tokens, their experts and what is done with them; the weights apart.
struct ExpertStep {
  ElementType element = ElementType::kFloat32;
  int64_t num_tokens = 0;   // T
  int64_t num_experts = 0;  // E
  int64_t top_k = 0;        // K
  int64_t hidden_size = 0;  // H
  int64_t inner_size = 0;   // I
  GatedActivation activation = GatedActivation::kSiluMul;
  float limit = 0.0f;                  // of kClampedSiluMul
  float alpha = 0.0f;                  // of kClampedSiluMul
  const void* x = nullptr;             // [T, H]
  const int32_t* experts = nullptr;    // [T, K]
  const float* weights = nullptr;      // [T, K]
  const void* gate_up_bias = nullptr;  // [E, 2 I] or null
  const void* down_bias = nullptr;     // [E, H] or null
  const void* residual = nullptr;      // [T, H] or null; may be y
  void* y = nullptr;                   // [T, H]

  // Leaves the tokens from `first` on, `count` of them.
  void narrow(int64_t first, int64_t count) {
    const int64_t bytes = first * hidden_size * element_bytes(element);
    num_tokens = count;
    x = static_cast<const char*>(x) + bytes;
    experts += first * top_k;
    weights += first * top_k;
    if (residual) residual = static_cast<const char*>(residual) + bytes;
    y = static_cast<char*>(y) + bytes;
  }
};

// y = residual + sum over k of weights[t, k] * (down h + down_bias), h = act(gate_up x + gate_up_bias).
struct MoeExpertsParams : ExpertStep {
  const void* gate_up = nullptr;  // [E, 2 I, H]; no earlier kernel writes it
  const void* down = nullptr;     // [E, H, I]; no earlier kernel writes it

  // The same call for the tokens from `first` on.
  MoeExpertsParams slice(int64_t first, int64_t count) const {
    MoeExpertsParams part = *this;
    part.narrow(first, count);
    return part;
  }
};

// gate is clamped from above, factor from both sides; NaN stays.
ORTOLAN_HOST_DEVICE float clamp_above(float x, float limit) { return x > limit ? limit : x; }
ORTOLAN_HOST_DEVICE float clamp_both(float x, float limit) {
  return x > limit ? limit : x < -limit ? -limit : x;
}

}  // namespace ortolan
