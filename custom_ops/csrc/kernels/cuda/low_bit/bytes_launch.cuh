// Host side of bytes.cuh: how its blocks share a layer.
#pragma once

#include <algorithm>

#include "bytes.cuh"
#include "bytes_layers.h"
#include "dense_params.h"
#include "kernels/cuda/common/launch.cuh"

namespace ortolan::cuda {

inline BytePlan plan_bytes(const LowBitLinearParams& p, int tokens, const Device& device) {
  constexpr int64_t kTurnBytes = 8192;  // of parts, about
  const LowBitWeight& w = p.weight;
  const int64_t slice = low_bit_slice_columns(w), groups = w.groups(), bits = code_bits(w.format);
  BytePlan plan{};
  plan.tiles = static_cast<int>(divide_up(p.num_outputs, p.activation == GatedActivation::kNone ? 16 : 8));
  plan.slices = static_cast<int>(divide_up(w.columns, slice));
  const int64_t tile_bytes = int64_t{plan.slices} * tokens * BytePlan::kLines * 4;
  plan.turn_tiles = static_cast<int>(std::clamp<int64_t>(
      kTurnBytes / tile_bytes, 1, std::max<int64_t>(1, divide_up(plan.tiles, device.num_multiprocessors))));
  const bool gated = p.activation != GatedActivation::kNone;
  plan.row_bytes = static_cast<int>(w.columns * bits / 8);
  plan.later_lines = gated ? 0 : 8;
  plan.line_bytes = (gated ? p.num_outputs : 8) * plan.row_bytes;
  plan.slice_step = BytePlan::kWarps % plan.slices;
  for (const int wraps : {0, 1}) {
    const int tiles = BytePlan::kWarps / plan.slices + wraps;
    plan.steps[wraps] = tiles * std::min(plan.tiles, device.num_multiprocessors) * (gated ? 8 : 16);
    plan.leaps[wraps] = int64_t{plan.steps[wraps]} * plan.row_bytes +
                        (plan.slice_step - wraps * plan.slices) * BytePlan::kRowBytes;
  }
  plan.groups = static_cast<int>(groups);
  plan.zero_row_bytes = static_cast<int>((groups * bits + 7) / 8);
  plan.paired = groups > 1 && has_paired_groups(w);
  plan.group_shift = 31;
  if (groups > 1 && !plan.paired)
    for (plan.group_shift = 0; slice << plan.group_shift < w.group_size;) ++plan.group_shift;
  plan.blocks = static_cast<int>(divide_up(plan.slices * slice, 2 * BytePlan::kBlockColumns) * 2);
  plan.plane_stride = plan.blocks * BytePlan::kBlockColumns + 64;
  return plan;
}

// Multiplies some tokens by blocks of which a multiprocessor holds `least` at least, so that the next layer's
// weights are on their way while this one's are multiplied. False, and nothing launched, where it does not.
template <typename Element, LowBitFormat kFormat, bool kZeros, int kTokenTiles, int kDepth>
bool launch_byte_tiles(const LowBitLinearParams& p, const GemvPass& pass, int least, const Launch& launch,
                       cudaError_t& error) {
  constexpr auto kKernel = low_bit_bytes_kernel<Element, kFormat, kZeros, kTokenTiles, kDepth>;
  constexpr int kReservedBytes = 1024, kStaticBytes = 64;  // of a block
  const ByteStreamParams params{dense_params(p), p.weight, plan_bytes(p, pass.num_tokens, launch.device),
                                pass};
  const int bytes =
      params.plan.shared_bytes(BytePlan::kWarps * kDepth * BytePlan::kStageBytes, pass.num_tokens);
  const int limit = launch.device.shared_bytes_per_block + kReservedBytes;
  if (least * (bytes + kStaticBytes + kReservedBytes) > limit) return false;
  const int blocks = std::min(params.plan.tiles, launch.device.num_multiprocessors);
  error = allow_shared_memory<kKernel>(launch.device);
  if (error == cudaSuccess)
    error = launch_overlapped(kKernel, dim3(static_cast<unsigned>(blocks)), dim3(BytePlan::kThreads),
                              static_cast<size_t>(bytes), launch, params);
  return true;
}

template <typename Element, LowBitFormat kFormat, bool kZeros>
bool launch_byte_pass(const LowBitLinearParams& p, const GemvPass& pass, const Launch& launch,
                      cudaError_t& error) {
  if (pass.num_tokens > 8)
    return launch_byte_tiles<Element, kFormat, kZeros, 4, 2>(p, pass, 1, launch, error);
  if (pass.num_tokens > 4)
    return launch_byte_tiles<Element, kFormat, kZeros, 2, 3>(p, pass, 1, launch, error);
  return launch_byte_tiles<Element, kFormat, kZeros, 1, 3>(p, pass, 2, launch, error) ||
         launch_byte_tiles<Element, kFormat, kZeros, 1, 5>(p, pass, 1, launch, error) ||
         launch_byte_tiles<Element, kFormat, kZeros, 1, 3>(p, pass, 1, launch, error);
}

template <typename Element, LowBitFormat kFormat, bool kZeros>
cudaError_t launch_byte_kind(const LowBitLinearParams& p, const Launch& launch) {
  const auto tokens = static_cast<int>(p.num_tokens);
  int most = 16;
  for (int first = 0; first < tokens;) {
    const GemvPass pass{first, std::min(tokens - first, most)};
    cudaError_t error = cudaErrorInvalidValue;
    if (launch_byte_pass<Element, kFormat, kZeros>(p, pass, launch, error)) {
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
