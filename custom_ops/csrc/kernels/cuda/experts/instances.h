// The kernel families behind moe_experts, as declarations.
#pragma once

#include "kernels/cuda/common/kernels.h"
#include "kernels/expert_params.h"

namespace ortolan::cuda {

// Scratch memory of some tokens' pairs of token and choice.
struct ExpertScratch {
  void* inner;       // [pairs, I], elements
  int32_t* offsets;  // [E + 1]: where each expert's pairs begin in `order`; for the grouped kernels
  int32_t* order;    // [pairs]: pairs grouped by expert, ascending; for the grouped kernels
  float* products;   // [pairs, H]; for the grouped kernels. Before, on sm_90a: inputs of `order`, elements
};

// A pass over the weights of each pair's expert. For any type and size; fast for few pairs.
template <typename Element>
cudaError_t launch_pair_experts(const MoeExpertsParams& p, const ExpertScratch& scratch,
                                const Launch& launch);

// Writes offsets and order.
cudaError_t launch_expert_lists(const MoeExpertsParams& p, const ExpertScratch& scratch,
                                const Launch& launch);
// Writes the inputs of `order`. The rest is for multiples of 8 elements and tensors aligned to 16 bytes.
cudaError_t launch_gather_inputs(const MoeExpertsParams& p, const ExpertScratch& scratch,
                                 const Launch& launch);
// y = residual + the sum of a token's products, in the order of its choices.
cudaError_t launch_combine(const MoeExpertsParams& p, const ExpertScratch& scratch, const Launch& launch);

// The products of grouped pairs, by mma.sync, and by wgmma on sm_90a; then y.
template <typename Element>
cudaError_t launch_grouped_experts(const MoeExpertsParams& p, const ExpertScratch& scratch,
                                   const Launch& launch);
template <typename Element>
cudaError_t launch_experts_sm90(const MoeExpertsParams& p, const ExpertScratch& scratch,
                                const Launch& launch);

}  // namespace ortolan::cuda
