// Host side of stream.cuh: how the blocks of a layer share it.
#pragma once

#include <algorithm>

#include "dense_params.h"
#include "kernels/cuda/common/row_vectors.cuh"
#include "stream_kinds.cuh"

namespace ortolan::cuda {

// Multiplies a pass of 9 to 16 tokens by held.cuh. False, and nothing launched, where the device or the layer
// is not for it.
template <typename Element>
bool launch_low_bit_held(const LowBitLinearParams& p, const GemvPass& pass, const Launch& launch,
                         cudaError_t& error);

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
  if (pass.num_tokens > 8)
    return launch_low_bit_held<typename Kind::Element>(p, pass, launch, error) ||
           launch_low_bit_tiles<Kind, 2, 2, 2>(p, pass, 1, launch, error);
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

template <typename Element>
cudaError_t launch_low_bit_stream(const LowBitLinearParams& p, const Launch& launch) {
  return with_low_bit_kind<Element>(p.weight,
                                    [&]<typename Kind>() { return launch_low_bit_kind<Kind>(p, launch); });
}

}  // namespace ortolan::cuda
