// The kernel families behind gated_delta_rule, as declarations.
#pragma once

#include "kernels/cuda/common/kernels.h"
#include "kernels/recurrent_params.h"

namespace ortolan::cuda {

// Kept updates and tokens one by one, for any type and size. Sequences with more than R tokens get only their
// state and length prepared where `reads_long` is false: launch_delta_chunks reads their tokens.
cudaError_t launch_delta_steps(const GatedDeltaRuleParams& p, bool reads_long, const Launch& launch);

// Sequences with more than R tokens by chunks, from the state that launch_delta_steps leaves.
bool delta_chunks_take(const GatedDeltaRuleParams& p, const Device& device);
size_t delta_chunks_workspace(const GatedDeltaRuleParams& p);
template <typename Element>
cudaError_t launch_delta_chunks(const GatedDeltaRuleParams& p, const Launch& launch);

}  // namespace ortolan::cuda
