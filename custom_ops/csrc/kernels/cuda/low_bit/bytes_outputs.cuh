// How bytes.cuh makes outputs of its warps' sums.
#pragma once

#include "bytes_inputs.cuh"

namespace ortolan::cuda {

// Outputs of a tile.
__device__ __forceinline__ int tile_outputs(const ByteStreamParams& p) {
  return p.linear.activation == GatedActivation::kNone ? 16 : 8;
}

// The outputs of a turn's tiles, from the warps' parts [tile, warp of the team, token, line].
template <typename Element>
struct ByteOutputs {
  const ByteStreamParams& p;
  const float* squares;  // [warp, token]: of the inputs
  Element residual;      // of the thread's first output of a turn

  struct Place {
    int row, token, tile, output;
    bool exists;
  };
  // Of number `i`, of 2^n tokens, of which some may be missing.
  __device__ __forceinline__ Place place_of(int i, int first_tile) const {
    const int shift = p.plan.later_lines ? 4 : 3, row = i & (1 << shift) - 1, rest = i >> shift;
    const int token = rest & (1 << p.plan.tokens_shift) - 1, tile = rest >> p.plan.tokens_shift;
    const int global_tile = (first_tile + tile) * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
    const int output = (global_tile << shift) + row;
    return {row, token, tile, output, token < p.pass.num_tokens && output < p.linear.num_outputs};
  }
  __device__ __forceinline__ int count(int tiles) const {
    return tiles << p.plan.tokens_shift + (p.plan.later_lines ? 4 : 3);
  }
  __device__ __forceinline__ Element residual_of(const Place& at) const {
    return load_beside<Element>(p.linear, p.pass.first_token + at.token, at.output);
  }
  // Starts to load what the turn will need.
  __device__ __forceinline__ void prepare(int first_tile, int tiles) {
    const auto i = static_cast<int>(threadIdx.x);
    if (!p.linear.residual || i >= count(tiles)) return;
    if (const Place at = place_of(i, first_tile); at.exists) residual = residual_of(at);
  }
  // The sum of a team's values.
  __device__ __forceinline__ float sum_of(const float* values, int stride) const {
    float sums[BytePlan::kMostWarps / 2];
#pragma unroll
    for (int n = 0; n < BytePlan::kMostWarps; ++n) {
      const float value = n < p.plan.span ? values[n * stride] : 0.0f;
      sums[n / 2] = n % 2 ? sums[n / 2] + value : value;
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  __device__ __forceinline__ void finish(const float* parts, int first_tile, int tiles) {
    const int tokens = p.pass.num_tokens, stride = tokens * BytePlan::kLines, numbers = count(tiles);
#pragma unroll 1
    for (auto i = static_cast<int>(threadIdx.x); i < numbers; i += static_cast<int>(blockDim.x)) {
      const Place at = place_of(i, first_tile);
      if (!at.exists) continue;
      const float* part = parts + (at.tile * p.plan.span * tokens + at.token) * BytePlan::kLines + at.row;
      float gate = sum_of(part, stride), factor = 0;
      if (!p.plan.later_lines) factor = sum_of(part + 8, stride);
      if (p.linear.norm_weight) {
        const float mean = sum_of(squares + at.token, tokens) * p.plan.input_share;
        const float norm = rsqrtf(mean + p.linear.epsilon);
        gate *= norm;
        factor *= norm;
      }
      if (p.linear.residual && i != static_cast<int>(threadIdx.x)) residual = residual_of(at);
      store_output<Element>(p.linear, p.pass.first_token + at.token, at.output, gate, factor, residual);
    }
  }
};

}  // namespace ortolan::cuda
