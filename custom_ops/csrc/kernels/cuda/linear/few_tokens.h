// Which layers get the same bits for a token whatever the number of tokens, up to kFewTokens.
#pragma once

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/fused_params.h"

namespace ortolan::cuda {

// For 9 to 16 tokens the same kernel, with twice the inputs in shared memory, falls behind cuBLAS (by up to
// 39 % on an H200).
constexpr int kFewTokens = 8;

// Rows of weights of 2 to 32 KB: the units of shorter ones are too small for the kernels that stream, the
// turns of longer ones too short.
inline bool takes_stream(const FusedLinearParams& p) {
  constexpr int64_t kMinRowBytes = 2048, kMaxRowBytes = 32768;
  const int64_t row_bytes = p.num_inputs * element_bytes(p.element);
  return row_bytes >= kMinRowBytes && row_bytes <= kMaxRowBytes && p.num_outputs <= (1 << 29);
}

// Whether few_sm90.cuh and rows_sm90.cuh multiply a layer whose rows must have the same bits whatever their
// number: they read whole pieces. Longer rows do not fit into shared memory, or their norm sums otherwise.
inline bool takes_chain(const FusedLinearParams& p, const Device& device) {
  constexpr int64_t kMostInputs = 32768, kMostNormedInputs = 8192;
  return device.compute_capability == 90 && p.element != ElementType::kFloat32 && p.num_inputs % 64 == 0 &&
         p.num_inputs <= (p.norm_weight ? kMostNormedInputs : kMostInputs) && p.num_outputs <= (1 << 29) &&
         has_whole_pieces(0, {p.input, p.weight, p.norm_weight});
}

}  // namespace ortolan::cuda
