// What the kernels of the gated delta rule share: which sequence a block is for, and rows of keys.
#pragma once

#include "kernels/cuda/common/elements.cuh"
#include "kernels/recurrent_params.h"

namespace ortolan::cuda {

// A sequence of the step, as far as it can be trusted: lengths and slots come from the device.
struct DeltaSequence {
  int64_t first = 0;
  int64_t count = 0;  // 0: nothing to do
  int64_t past = 0;
  int64_t row = 0;

  __device__ DeltaSequence(const GatedDeltaRuleParams& p, int64_t sequence) {
    first = p.packing.first(sequence);
    past = p.past_len[sequence];
    row = p.slots.at(sequence);
    const int64_t tokens = p.packing.count(sequence);
    const bool inside = first >= 0 && tokens > 0 && first + tokens <= p.packing.num_tokens;
    count = inside && past >= 0 && row >= 0 && row < p.slots.num_rows ? tokens : 0;
  }
};

// The factor that gives a row of this sum of squares the length 1, if asked for.
__device__ __forceinline__ float length_factor(const GatedDeltaRuleParams& p, float squares) {
  return p.l2_norm ? 1.0f / sqrtf(squares + kKeyNormEpsilon) : 1.0f;
}

// The same of a row; for a whole warp.
template <typename Element>
__device__ __forceinline__ float unit_factor(const GatedDeltaRuleParams& p, const Element* row, int lane) {
  float sum = 0;
  for (int i = lane; i < p.key_size; i += 32) sum = fmaf(to_float(row[i]), to_float(row[i]), sum);
  return length_factor(p, warp_sum(sum));
}

template <typename Element>
__device__ __forceinline__ const Element* key_row(const GatedDeltaRuleParams& p, const void* rows,
                                                  int64_t token, int64_t head) {
  return static_cast<const Element*>(rows) + (token * p.num_key_heads + head) * p.key_size;
}

}  // namespace ortolan::cuda
