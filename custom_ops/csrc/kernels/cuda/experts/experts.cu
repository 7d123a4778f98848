// MoeExperts: which kernel family takes a call.
#include <algorithm>

#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/operators.generated.h"
#include "slices.h"

namespace ortolan::cuda {
namespace {

// Above, an expert is likely to be shared by pairs, or a tile of its rows to find enough of them.
int64_t few_pairs(const MoeExpertsParams& p) { return std::max<int64_t>(8, p.num_experts / 8); }

bool is_grouped(const MoeExpertsParams& p) {
  return p.num_tokens * p.top_k > few_pairs(p) && takes_grouped_experts(p) &&
         has_whole_pieces(0, {p.gate_up, p.down});
}

cudaError_t multiply_grouped(const MoeExpertsParams& p, const ExpertScratch& scratch, const Launch& launch) {
  cudaError_t error = launch_expert_lists(p, scratch, launch);
  if (error == cudaSuccess) error = launch_expert_inputs(p, scratch, launch);
  for (const bool gated : {true, false})
    if (error == cudaSuccess) error = launch_expert_product(p, scratch, gated, launch);
  return error == cudaSuccess ? launch_combine(p, scratch, launch) : error;
}

}  // namespace

bool takes_grouped_experts(const ExpertStep& p) {
  const int64_t row_bits = (p.hidden_size | p.inner_size) * 2;
  return p.element != ElementType::kFloat32 && p.inner_size > 0 &&
         has_whole_pieces(row_bits, {p.x, p.residual, p.y});
}

cudaError_t launch_expert_inputs(const ExpertStep& p, const ExpertScratch& scratch, const Launch& launch) {
  return launch.device.compute_capability == 90 ? launch_gather_inputs(p, scratch, launch) : cudaSuccess;
}

cudaError_t launch_expert_product(const MoeExpertsParams& p, const ExpertScratch& scratch, bool gated,
                                  const Launch& launch) {
  return with_half_element(p.element, [&]<typename Element>() {
    return launch.device.compute_capability == 90
               ? launch_sm90_product<Element>(p, scratch, gated, launch)
               : launch_grouped_product<Element>(p, scratch, gated, launch);
  });
}

size_t moe_experts_workspace(const MoeExpertsParams& params, const Device&) {
  return params.num_tokens == 0 ? 0 : ExpertSlices::of(params, is_grouped(params)).bytes();
}

cudaError_t moe_experts(const MoeExpertsParams& params, const Launch& launch) {
  if (params.num_tokens == 0 || params.hidden_size == 0) return cudaSuccess;
  const bool grouped = is_grouped(params);
  const ExpertSlices slices = ExpertSlices::of(params, grouped);
  const ExpertScratch scratch = slices.scratch(launch.workspace);
  return slices.each(params, [&](const MoeExpertsParams& p) {
    if (grouped) return multiply_grouped(p, scratch, launch);
    return with_element(p.element,
                        [&]<typename Element>() { return launch_pair_experts<Element>(p, scratch, launch); });
  });
}

}  // namespace ortolan::cuda
