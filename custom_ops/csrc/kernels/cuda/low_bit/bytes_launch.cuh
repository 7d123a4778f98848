// Host side of bytes.cuh: how its blocks share a layer.
#pragma once

#include <algorithm>

#include "bytes.cuh"
#include "bytes_layers.h"
#include "dense_params.h"
#include "kernels/cuda/common/launch.cuh"

namespace ortolan::cuda {

// How many warps share a tile, and how many tiles a block's warps take at once.
inline void share_byte_slices(BytePlan& plan) {
  plan.rounds = static_cast<int>(divide_up(plan.slices, BytePlan::kMostWarps));
  plan.span = static_cast<int>(divide_up(plan.slices, plan.rounds));
  plan.teams = BytePlan::kMostWarps / plan.span;
}

// All but the blocks, and how many units are on their way.
inline BytePlan plan_bytes(const LowBitLinearParams& p) {
  const LowBitWeight& w = p.weight;
  const int64_t slice = low_bit_slice_columns(w), groups = w.groups(), bits = code_bits(w.format);
  const bool gated = p.activation != GatedActivation::kNone;
  BytePlan plan{};
  plan.tiles = static_cast<int>(divide_up(p.num_outputs, gated ? 8 : 16));
  plan.slices = static_cast<int>(divide_up(w.columns, slice));
  share_byte_slices(plan);
  plan.row_bytes = static_cast<int>(w.columns * bits / 8);
  plan.whole_slices = plan.row_bytes / BytePlan::kRowBytes;
  plan.later_lines = gated ? 0 : 8;
  plan.later_bytes = (gated ? p.num_outputs : 8) * plan.row_bytes;
  plan.input_share = 1.0f / static_cast<float>(p.num_inputs);
  plan.groups = static_cast<int>(groups);
  plan.zero_row_bytes = static_cast<int>((groups * bits + 7) / 8);
  plan.paired = groups > 1 && has_paired_groups(w);
  plan.group_shift = 31;
  if (groups > 1 && !plan.paired)
    for (plan.group_shift = 0; slice << plan.group_shift < w.group_size;) ++plan.group_shift;
  return plan;
}

// Shares the tiles among blocks, `most_blocks` at most.
inline void share_byte_tiles(BytePlan& plan, int tokens, int most_blocks) {
  constexpr int64_t kTurnBytes = 8192, kTurnTiles = 4;  // of parts, about; of a team, where these are more
  plan.blocks = std::min(plan.tiles, most_blocks);
  plan.tile_step = plan.teams * plan.blocks * (plan.later_lines ? 16 : 8);
  plan.tile_bytes = int64_t{plan.tile_step} * plan.row_bytes;
  const int64_t team_bytes = int64_t{plan.warps()} * tokens * BytePlan::kLines * 4;  // of a tile of each
  const int64_t team_tiles = divide_up(divide_up(plan.tiles, plan.blocks), plan.teams);
  plan.turn_tiles =
      plan.teams * static_cast<int>(std::min(std::max(kTurnBytes / team_bytes, kTurnTiles), team_tiles));
  while (1 << plan.tokens_shift < tokens) ++plan.tokens_shift;
}

// Plans blocks of which a multiprocessor holds `resident`, with as many units on their way as fit. False
// where it does not hold them.
template <int kBits, bool kZeros>
bool plan_byte_blocks(BytePlan& plan, int tokens, int resident, int launched, const Device& device) {
  constexpr int kReservedBytes = 1024;  // of a block
  const int limit = device.shared_bytes_per_block + kReservedBytes;
  share_byte_tiles(plan, tokens, launched * device.num_multiprocessors);
  for (plan.depth = BytePlan::kMostDepth; plan.depth > 1; --plan.depth)
    if (resident * (ByteLayout<kBits, kZeros>(plan, tokens).bytes + kReservedBytes) <= limit) return true;
  return false;
}

// Long layers are multiplied by two blocks of a multiprocessor, which have more warps at work. Short ones by
// one block, with room for another: the next layer's weights are on their way while this one's are
// multiplied. False where a block has too little shared memory.
template <int kBits, bool kZeros>
bool plan_byte_launch(BytePlan& plan, int tokens, const Device& device) {
  const int64_t units = int64_t{plan.tiles} * plan.slices / device.num_multiprocessors;
  const bool is_long = units >= (tokens > 4 ? 48 : 90);
  return plan_byte_blocks<kBits, kZeros>(plan, tokens, 2, is_long ? 2 : 1, device) ||
         plan_byte_blocks<kBits, kZeros>(plan, tokens, 1, 1, device);
}

// False, and nothing launched, where a block has too little shared memory.
template <typename Element, LowBitFormat kFormat, bool kZeros, int kTokenTiles>
bool launch_byte_tiles(const LowBitLinearParams& p, const GemvPass& pass, const Launch& launch,
                       cudaError_t& error) {
  constexpr auto kKernel = low_bit_bytes_kernel<Element, kFormat, kZeros, kTokenTiles>;
  constexpr int kBits = static_cast<int>(code_bits(kFormat));
  ByteStreamParams params{dense_params(p), p.weight, plan_bytes(p), pass};
  if (!plan_byte_launch<kBits, kZeros>(params.plan, pass.num_tokens, launch.device)) return false;
  const int bytes = ByteLayout<kBits, kZeros>(params.plan, pass.num_tokens).bytes;
  error = allow_shared_memory<kKernel>(launch.device);
  if (error == cudaSuccess)
    error = launch_overlapped(kKernel, dim3(static_cast<unsigned>(params.plan.blocks)),
                              dim3(static_cast<unsigned>(32 * params.plan.warps())),
                              static_cast<size_t>(bytes), launch, params);
  return true;
}

template <typename Element, LowBitFormat kFormat, bool kZeros>
cudaError_t launch_byte_kind(const LowBitLinearParams& p, const Launch& launch) {
  const auto tokens = static_cast<int>(p.num_tokens);
  int most = 8;
  for (int first = 0; first < tokens;) {
    const GemvPass pass{first, std::min(tokens - first, most)};
    cudaError_t error = cudaErrorInvalidValue;
    const bool launched = pass.num_tokens > 4
                              ? launch_byte_tiles<Element, kFormat, kZeros, 2>(p, pass, launch, error)
                              : launch_byte_tiles<Element, kFormat, kZeros, 1>(p, pass, launch, error);
    if (launched) {
      if (error != cudaSuccess) return error;
      first += pass.num_tokens;
    } else if ((most /= 2) == 0) {
      return error;
    }
  }
  return cudaSuccess;
}

template <typename Element>
cudaError_t launch_low_bit_bytes(const LowBitLinearParams& p, const Launch& launch) {
  const bool zeros = p.weight.zero_points;
  if (p.weight.format == LowBitFormat::kInt4)
    return zeros ? launch_byte_kind<Element, LowBitFormat::kInt4, true>(p, launch)
                 : launch_byte_kind<Element, LowBitFormat::kInt4, false>(p, launch);
  return zeros ? launch_byte_kind<Element, LowBitFormat::kInt8, true>(p, launch)
               : launch_byte_kind<Element, LowBitFormat::kInt8, false>(p, launch);
}

}  // namespace ortolan::cuda
