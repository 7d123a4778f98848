// Which layers get the same bits for a token whatever the number of tokens, up to kFewTokens.
#pragma once

#include "kernels/fused_params.h"

namespace ortolan::cuda {

// For 9 to 16 tokens the same kernel, with twice the inputs in shared memory, falls behind cuBLAS (by up to
// 39 % on an H200).
constexpr int kFewTokens = 8;

// Rows of weights of 2 to 16 KB: the units of shorter ones are too small for the kernels that stream, the
// turns of longer ones too short.
inline bool takes_stream(const FusedLinearParams& p) {
  constexpr int64_t kMinRowBytes = 2048, kMaxRowBytes = 16384;
  const int64_t row_bytes = p.num_inputs * element_bytes(p.element);
  return row_bytes >= kMinRowBytes && row_bytes <= kMaxRowBytes && p.num_outputs <= (1 << 29);
}

}  // namespace ortolan::cuda
