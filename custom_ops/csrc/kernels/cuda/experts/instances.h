// The kernel families behind moe_experts and low_bit_experts, as declarations.
#pragma once

#include "kernels/cuda/common/kernels.h"
#include "kernels/low_bit_expert_params.h"

namespace ortolan::cuda {

// Scratch memory of some tokens' pairs of token and choice. Only families that keep products have the rest.
struct ExpertScratch {
  void* inner;       // [pairs, I], elements
  int32_t* offsets;  // [E + 1]: where each expert's pairs begin in `order`
  int32_t* order;    // [pairs]: pairs grouped by expert, ascending
  void* products;    // [pairs, H], elements. Before, for grouped kernels on sm_90a: the inputs of `order`
};

// A pass over the weights of each pair's expert. For any type and size; fast for few pairs.
template <typename Element>
cudaError_t launch_pair_experts(const MoeExpertsParams& p, const ExpertScratch& scratch,
                                const Launch& launch);

// Writes offsets and order.
cudaError_t launch_expert_lists(const ExpertStep& p, const ExpertScratch& scratch, const Launch& launch);
// y = residual + the sum of a token's products, in the order of its choices. For 16-bit elements in whole
// pieces of 16 bytes.
cudaError_t launch_combine(const ExpertStep& p, const ExpertScratch& scratch, const Launch& launch);

// Products of pairs that lie grouped by expert: 16-bit elements, and rows in whole pieces of 16 bytes.
bool takes_grouped_experts(const ExpertStep& p);
// What they ask for before the first product.
cudaError_t launch_expert_inputs(const ExpertStep& p, const ExpertScratch& scratch, const Launch& launch);
// gate_up and the activation, to `inner`, which lies grouped too; or down, to `products`. For the experts
// whose lists begin at offsets[0 .. E].
cudaError_t launch_expert_product(const MoeExpertsParams& p, const ExpertScratch& scratch, bool gated,
                                  const Launch& launch);

// The same by mma.sync.
template <typename Element>
cudaError_t launch_grouped_product(const MoeExpertsParams& p, const ExpertScratch& scratch, bool gated,
                                   const Launch& launch);
// The same by wgmma, and its inputs.
cudaError_t launch_gather_inputs(const ExpertStep& p, const ExpertScratch& scratch, const Launch& launch);
template <typename Element>
cudaError_t launch_sm90_product(const MoeExpertsParams& p, const ExpertScratch& scratch, bool gated,
                                const Launch& launch);

}  // namespace ortolan::cuda
