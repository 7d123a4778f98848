// The gated activation of an expert.
#pragma once

#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/linear/gates.cuh"
#include "kernels/expert_params.h"

namespace ortolan::cuda {

__device__ __forceinline__ float gate_product(const ExpertStep& p, float gate, float factor) {
  if (p.activation != GatedActivation::kClampedSiluMul) return activate(p.activation, gate) * factor;
  gate = clamp_above(gate, p.limit);
  return gate / (1.0f + expf(-p.alpha * gate)) * (clamp_both(factor, p.limit) + 1.0f);
}

// The same for results that are rounded to 16 bits.
template <GatedActivation kActivation>
__device__ __forceinline__ float gate_product_nearly(const ExpertStep& p, float gate, float factor) {
  if constexpr (kActivation != GatedActivation::kClampedSiluMul)
    return activate_nearly(kActivation, gate) * factor;
  gate = clamp_above(gate, p.limit);
  return __fdividef(gate, 1.0f + __expf(-p.alpha * gate)) * (clamp_both(factor, p.limit) + 1.0f);
}

// Element `index` of an optional tensor, or 0.
template <typename Element>
__device__ __forceinline__ float element_at(const void* values, int64_t index) {
  return values ? to_float(static_cast<const Element*>(values)[index]) : 0.0f;
}

__device__ __forceinline__ bool exists(const ExpertStep& p, int32_t expert) {
  return expert >= 0 && expert < p.num_experts;
}

}  // namespace ortolan::cuda
