// MoeGate on the CPU: a task is a block of tokens.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#define ORTOLAN_ISA isa_plain
#include "element.h"
#include "kernels/cpu/operators.generated.h"
#include "kernels/expert_order.h"

namespace ortolan::cpu {
namespace {

using isa_plain::Half;
using isa_plain::to_float;

constexpr int64_t kTaskTokens = 16;

// Turns a row of logits into scores: exponentials that are still to be divided by their sum, or sigmoids.
// Returns that sum, or 1.
float score_experts(const MoeGateParams& p, const float* logits, float* scores) {
  if (p.scoring == GateScoring::kSigmoid) {
    for (int64_t e = 0; e < p.num_experts; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    return 1.0f;
  }
  float largest = -std::numeric_limits<float>::infinity();
  double sum = 0;  // rounding would grow with the number of experts
  for (int64_t e = 0; e < p.num_experts; ++e) largest = std::max(largest, logits[e]);
  for (int64_t e = 0; e < p.num_experts; ++e) sum += scores[e] = std::exp(logits[e] - largest);
  return static_cast<float>(sum);
}

template <typename Element>
void gate_tokens(const MoeGateParams& p, int64_t begin, int64_t end) {
  std::vector<float> logits(p.num_experts), scores(p.num_experts);
  std::vector<uint64_t> ranks(p.num_experts);
  for (int64_t t = begin; t < end; ++t) {
    const auto* row = static_cast<const Element*>(p.router_logits) + t * p.num_experts;
    for (int64_t e = 0; e < p.num_experts; ++e) logits[e] = to_float(row[e]);
    const float total = score_experts(p, logits.data(), scores.data());
    for (int64_t e = 0; e < p.num_experts; ++e) {
      const float value = p.selection_bias ? scores[e] / total + p.selection_bias[e] : logits[e];
      ranks[e] = expert_rank(value, e);
    }
    std::partial_sort(ranks.begin(), ranks.begin() + p.top_k, ranks.end(), std::greater<>());
    int32_t* experts = p.experts + t * p.top_k;
    float chosen = 0;
    for (int64_t k = 0; k < p.top_k; ++k) {
      experts[k] = static_cast<int32_t>(ranked_expert(ranks[k]));
      chosen += scores[experts[k]];
    }
    // A NaN shows, also where its expert is not chosen.
    const float sum = !p.normalise || std::isnan(total) ? total : chosen;
    for (int64_t k = 0; k < p.top_k; ++k) {
      const float weight = sum == 0 ? 0.0f : scores[experts[k]] / sum * p.scale;
      p.weights[t * p.top_k + k] = p.expert_scale ? weight * p.expert_scale[experts[k]] : weight;
    }
  }
}

}  // namespace

void moe_gate(const MoeGateParams& params, ParallelFor& parallel) {
  parallel.each((params.num_tokens + kTaskTokens - 1) / kTaskTokens, [&](int64_t task) {
    const int64_t begin = task * kTaskTokens, end = std::min(begin + kTaskTokens, params.num_tokens);
    if (params.element == ElementType::kFloat32) return gate_tokens<float>(params, begin, end);
    gate_tokens<Half>(params, begin, end);
  });
}

}  // namespace ortolan::cpu
