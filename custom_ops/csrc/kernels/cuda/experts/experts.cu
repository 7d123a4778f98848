// MoeExperts: which kernel family takes a call, and how its tokens are cut so that scratch memory is bounded.
#include <algorithm>

#include "instances.h"
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {
namespace {

constexpr int64_t kFewPairs = 32;                    // with more, experts may be shared by pairs
constexpr int64_t kSliceBytes = int64_t{384} << 20;  // of what the pairs of a slice keep between kernels

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

bool is_grouped(const MoeExpertsParams& p) {
  const int64_t row_bits = (p.hidden_size | p.inner_size) * 2;
  return p.element != ElementType::kFloat32 && p.num_tokens * p.top_k > kFewPairs && p.inner_size > 0 &&
         has_whole_pieces(row_bits, {p.x, p.gate_up, p.down, p.residual, p.y});
}

// Slices of about equal size: a small last one would read all weights for a few tokens.
struct ExpertSlices {
  bool grouped;
  int64_t tokens;  // of a slice
  int64_t inner_bytes, order_bytes, offset_bytes, product_bytes;

  static ExpertSlices of(const MoeExpertsParams& p) {
    const bool grouped = is_grouped(p);
    const int64_t inner = p.top_k * p.inner_size * element_bytes(p.element);
    const int64_t products = grouped ? p.top_k * p.hidden_size * int64_t{sizeof(float)} : 0;
    const int64_t most = std::max<int64_t>(kSliceBytes / std::max<int64_t>(inner + products, 1), 1);
    const int64_t tokens = divide_up(p.num_tokens, divide_up(p.num_tokens, most));
    const int64_t order = grouped ? tokens * p.top_k * int64_t{sizeof(int32_t)} : 0;
    const int64_t offsets = grouped ? (p.num_experts + 1) * int64_t{sizeof(int32_t)} : 0;
    return {grouped,        tokens,           aligned(tokens * inner),
            aligned(order), aligned(offsets), aligned(tokens * products)};
  }

  size_t bytes() const { return inner_bytes + order_bytes + offset_bytes + product_bytes; }

  ExpertScratch scratch(void* workspace) const {
    auto* inner = static_cast<char*>(workspace);
    char* order = inner + inner_bytes;
    char* offsets = order + order_bytes;
    return {inner, reinterpret_cast<int32_t*>(offsets), reinterpret_cast<int32_t*>(order),
            reinterpret_cast<float*>(offsets + offset_bytes)};
  }
};

cudaError_t multiply(const MoeExpertsParams& p, const ExpertSlices& slices, const Launch& launch) {
  const ExpertScratch scratch = slices.scratch(launch.workspace);
  if (!slices.grouped)
    return with_element(p.element,
                        [&]<typename Element>() { return launch_pair_experts<Element>(p, scratch, launch); });
  const cudaError_t error = launch_expert_lists(p, scratch, launch);
  if (error != cudaSuccess) return error;
  return with_half_element(p.element, [&]<typename Element>() {
    return launch.device.compute_capability == 90 ? launch_experts_sm90<Element>(p, scratch, launch)
                                                  : launch_grouped_experts<Element>(p, scratch, launch);
  });
}

}  // namespace

size_t moe_experts_workspace(const MoeExpertsParams& params, const Device&) {
  return params.num_tokens == 0 ? 0 : ExpertSlices::of(params).bytes();
}

cudaError_t moe_experts(const MoeExpertsParams& params, const Launch& launch) {
  if (params.num_tokens == 0 || params.hidden_size == 0) return cudaSuccess;
  const ExpertSlices slices = ExpertSlices::of(params);
  for (int64_t first = 0; first < params.num_tokens; first += slices.tokens) {
    const int64_t count = std::min(slices.tokens, params.num_tokens - first);
    const cudaError_t error = multiply(params.slice(first, count), slices, launch);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ortolan::cuda
