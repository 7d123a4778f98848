// Host side of stream.cuh: which layers it takes, and how their blocks share them.
#pragma once

#include <algorithm>

#include "dense_params.h"
#include "kernels/cuda/common/row_vectors.cuh"
#include "stream.cuh"
#include "stream_layers.h"

namespace ortolan::cuda {

inline int log2_of(int64_t power) {
  int log = 0;
  while (power >> log > 1) ++log;
  return log;
}

inline LowBitPlan plan_low_bit(const LowBitLinearParams& p) {
  const LowBitWeight& w = p.weight;
  const int64_t bits = code_bits(w.format), step = low_bit_step_columns(w), groups = w.groups();
  LowBitPlan plan{};
  plan.tiles = static_cast<int>(divide_up(p.num_outputs, p.activation == GatedActivation::kNone ? 16 : 8));
  plan.steps = static_cast<int>(divide_up(w.columns, step));
  plan.row_bytes = static_cast<int>(w.columns * bits / 8);
  plan.scale_row_bytes = static_cast<int>(groups * low_bit_scale_bytes(w.format));
  plan.zero_row_bytes = static_cast<int>(w.format == LowBitFormat::kInt4 ? divide_up(groups, 2) : groups);
  plan.scale_rows_shift = w.format == LowBitFormat::kFp8 ? log2_of(w.scale_rows) : 0;
  plan.step_groups = has_short_groups(w) ? static_cast<int>(step / w.group_size) : 1;
  plan.group_steps_shift = groups == 1 ? 31 : has_short_groups(w) ? 0 : log2_of(w.group_size / step);
  plan.scale_words = plan.step_groups * low_bit_scale_bytes(w.format) > 4 ? 2 : 1;
  plan.token_stride = static_cast<int>(plan.steps * step * 2 + 64);
  return plan;
}

// Blocks of so many bytes of shared memory that a multiprocessor holds, up to two.
inline int resident_low_bit_blocks(int bytes, const Device& device) {
  constexpr int kReservedBytes = 1024, kStaticBytes = 1024;  // of a block
  if (bytes + kStaticBytes > device.shared_bytes_per_block) return 0;
  return 2 * (bytes + kStaticBytes + kReservedBytes) <= device.shared_bytes_per_block + kReservedBytes ? 2
                                                                                                       : 1;
}

// Multiplies some tokens by blocks of which a multiprocessor holds `least` at least. False, and nothing
// launched, where it does not.
template <typename Kind, int kTokenTiles, int kTeams, int kDepth>
bool launch_low_bit_tiles(const LowBitLinearParams& p, const GemvPass& pass, int least, const Launch& launch,
                          cudaError_t& error) {
  constexpr auto kKernel = low_bit_stream_kernel<Kind, kTokenTiles, kTeams, kDepth>;
  const LowBitStreamParams params{dense_params(p), p.weight, plan_low_bit(p), pass};
  const int bytes = params.plan.shared_bytes<kTokenTiles>(kTeams, kDepth, pass.num_tokens);
  const int resident = std::min(resident_low_bit_blocks(bytes, launch.device), 2 / kTeams);
  if (resident < least) return false;
  const auto blocks =
      std::min(divide_up(params.plan.tiles, kTeams), int64_t{resident} * launch.device.num_multiprocessors);
  error = allow_shared_memory<kKernel>(launch.device);
  if (error == cudaSuccess)
    error = launch_overlapped(kKernel, dim3(static_cast<unsigned>(blocks)), dim3(kTeams * kGemvThreads),
                              static_cast<size_t>(bytes), launch, params);
  return true;
}

// The same, such that a multiprocessor has two teams if it can: of two blocks, or of one whose teams share
// the inputs.
template <typename Kind>
bool launch_low_bit_pass(const LowBitLinearParams& p, const GemvPass& pass, const Launch& launch,
                         cudaError_t& error) {
  if (pass.num_tokens > 8) return launch_low_bit_tiles<Kind, 2, 2, 2>(p, pass, 1, launch, error);
  return launch_low_bit_tiles<Kind, 1, 1, 5>(p, pass, 2, launch, error) ||
         launch_low_bit_tiles<Kind, 1, 2, 5>(p, pass, 1, launch, error) ||
         launch_low_bit_tiles<Kind, 1, 1, 5>(p, pass, 1, launch, error);
}

template <typename Kind>
cudaError_t launch_low_bit_kind(const LowBitLinearParams& p, const Launch& launch) {
  const auto tokens = static_cast<int>(p.num_tokens);
  int most = 16;
  for (int first = 0; first < tokens;) {
    const GemvPass pass{first, std::min(tokens - first, most)};
    cudaError_t error = cudaErrorInvalidValue;
    if (launch_low_bit_pass<Kind>(p, pass, launch, error)) {
      if (error != cudaSuccess) return error;
      first += pass.num_tokens;
    } else if ((most /= 2) == 0) {
      return error;
    }
  }
  return cudaSuccess;
}

template <typename Element, LowBitFormat kFormat>
cudaError_t launch_low_bit_integers(const LowBitLinearParams& p, const Launch& launch) {
  const bool is_short = has_short_groups(p.weight);
  if (p.weight.zero_points)
    return is_short ? launch_low_bit_kind<LowBitKind<Element, kFormat, true, true>>(p, launch)
                    : launch_low_bit_kind<LowBitKind<Element, kFormat, true, false>>(p, launch);
  return is_short ? launch_low_bit_kind<LowBitKind<Element, kFormat, false, true>>(p, launch)
                  : launch_low_bit_kind<LowBitKind<Element, kFormat, false, false>>(p, launch);
}

template <typename Element>
cudaError_t launch_low_bit_stream(const LowBitLinearParams& p, const Launch& launch) {
  switch (p.weight.format) {
    case LowBitFormat::kInt4:
      return launch_low_bit_integers<Element, LowBitFormat::kInt4>(p, launch);
    case LowBitFormat::kInt8:
      return launch_low_bit_integers<Element, LowBitFormat::kInt8>(p, launch);
    case LowBitFormat::kFp8:
      return launch_low_bit_kind<LowBitKind<Element, LowBitFormat::kFp8, false, false>>(p, launch);
    case LowBitFormat::kMxfp4:
      return launch_low_bit_kind<LowBitKind<Element, LowBitFormat::kMxfp4, false, true>>(p, launch);
    case LowBitFormat::kNvfp4:
      return launch_low_bit_kind<LowBitKind<Element, LowBitFormat::kNvfp4, false, true>>(p, launch);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ortolan::cuda
