// MoeGate: a warp chooses the experts of one token, one after the other. Ranks wait in its registers; those
// of experts beyond them are found anew for each choice.
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "kernels/cuda/operators.generated.h"
#include "kernels/expert_order.h"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

// The scores of one token: of softmax, exponentials that are still to be divided by `total`.
template <typename Element>
struct GateRow {
  static constexpr int kHeld = 8;  // ranks in registers, of experts lane, lane + 32, ...
  const MoeGateParams& p;
  const Element* logits;  // [E]
  float largest = -INFINITY;
  float total = 1.0f;
  uint64_t ranks[kHeld];

  __device__ __forceinline__ GateRow(const MoeGateParams& params, int64_t token, int lane)
      : p(params), logits(static_cast<const Element*>(params.router_logits) + token * params.num_experts) {
    if (p.scoring != GateScoring::kSigmoid) {
      for (int64_t e = lane; e < p.num_experts; e += 32) largest = fmaxf(largest, to_float(logits[e]));
      largest = fold_lanes<16, 1>(largest, Max());
      total = 0;
      for (int64_t e = lane; e < p.num_experts; e += 32) total += score(e);
      total = warp_sum(total);
    }
#pragma unroll
    for (int n = 0; n < kHeld; ++n) ranks[n] = lane + 32 * n < p.num_experts ? rank(lane + 32 * n) : 0;
  }

  __device__ __forceinline__ float score(int64_t expert) const {
    const float z = to_float(logits[expert]);
    return p.scoring == GateScoring::kSigmoid ? 1.0f / (1.0f + expf(-z)) : expf(z - largest);
  }
  __device__ __forceinline__ uint64_t rank(int64_t expert) const {
    if (!p.selection_bias) return expert_rank(to_float(logits[expert]), expert);
    return expert_rank(score(expert) / total + p.selection_bias[expert], expert);
  }
  // The expert that ranks highest below `last`, the rank of the choice before.
  __device__ __forceinline__ uint64_t highest_below(uint64_t last, int lane) const {
    uint64_t best = 0;
    const auto offer = [&](uint64_t own) {
      if (own < last && own > best) best = own;
    };
#pragma unroll
    for (const uint64_t own : ranks) offer(own);
    for (int64_t e = lane + 32 * kHeld; e < p.num_experts; e += 32) offer(rank(e));
    const unsigned high = __reduce_max_sync(~0u, static_cast<unsigned>(best >> 32));
    const bool leads = static_cast<unsigned>(best >> 32) == high;
    const unsigned low = __reduce_max_sync(~0u, leads ? static_cast<unsigned>(best) : 0u);
    return static_cast<uint64_t>(high) << 32 | low;
  }
};

template <typename Element>
__global__ void __launch_bounds__(kThreads) gate_kernel(const __grid_constant__ MoeGateParams p) {
  launch_dependents();
  touch_parameters(p);
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32;
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (token >= p.num_tokens) return;
  const GateRow<Element> row(p, token, lane);
  int32_t* experts = p.experts + token * p.top_k;
  float* weights = p.weights + token * p.top_k;
  uint64_t last = ~uint64_t{0};
  float chosen = 0, own_score = 0;  // of choice `lane`, the first 32
  int64_t own_expert = 0;
  for (int64_t k = 0; k < p.top_k; ++k) {
    last = row.highest_below(last, lane);
    const int64_t expert = ranked_expert(last);
    const float score = row.score(expert);
    chosen += score;
    if (k == lane) own_score = score, own_expert = expert;
    if (k >= 32 && lane == 0) experts[k] = static_cast<int32_t>(expert), weights[k] = score;
  }
  __syncwarp();
  // A NaN shows, also where its expert is not chosen.
  const float sum = !p.normalise || isnan(row.total) ? row.total : chosen;
  for (int64_t k = lane; k < p.top_k; k += 32) {
    const bool is_own = k == lane;
    if (is_own) experts[k] = static_cast<int32_t>(own_expert);
    const float weight = sum == 0 ? 0.0f : (is_own ? own_score : weights[k]) / sum * p.scale;
    weights[k] = p.expert_scale ? weight * p.expert_scale[experts[k]] : weight;
  }
}

}  // namespace

cudaError_t moe_gate(const MoeGateParams& params, const Launch& launch) {
  if (params.num_tokens == 0) return cudaSuccess;
  const dim3 blocks(static_cast<unsigned>(divide_up(params.num_tokens, kWarps)));
  return with_element(params.element, [&]<typename Element>() {
    return launch_overlapped(gate_kernel<Element>, blocks, dim3(kThreads), 0, launch, params);
  });
}

}  // namespace ortolan::cuda
