// Which kernel multiplies few tokens. The bits of a token do not depend on how many there are: which kernels
// may take it, which sum alike, depends on the layer alone.
#pragma once

#include "few_sm90_launch.cuh"
#include "few_tokens.h"
#include "gemv.cuh"
#include "gemv_sm90_launch.cuh"

namespace ortolan::cuda {

// Whether few_sm90.cuh is ahead of gemv_sm90.cuh for up to eight tokens: from two on where a block has much
// to read, for one where it has very much.
inline bool is_faster_by_tiles(const FusedLinearParams& p, int tokens, const Device& device) {
  constexpr int64_t kVeryLongBytes = int64_t{2} << 20;
  const int64_t bytes = few_block_bytes(p, device);
  return tokens > 2 || bytes >= (tokens == 2 ? kFewLongBytes : kVeryLongBytes);
}

// Multiplies the tokens from `first` on by kernels of sm_90 that sum alike; `taken` says how many one launch
// takes. False, and nothing launched, where the layer is not theirs.
template <typename Element, bool kGated>
bool launch_stream_step(const FusedLinearParams& p, int first, int& taken, const Launch& launch,
                        cudaError_t& error) {
  const auto left = static_cast<int>(p.num_tokens) - first;
  if (!takes_stream(p)) return false;
  taken = std::min(left, kFewTokens);
  if (is_faster_by_tiles(p, taken, launch.device) &&
      launch_few_stream<Element, kGated, false>(p, {first, taken}, launch, error))
    return true;
  taken = std::min(left, 2);
  if (taken == 2 && launch_gemv_stream<Element, 2, kGated>(p, {first, 2}, launch, error)) return true;
  taken = 1;
  return launch_gemv_stream<Element, 1, kGated>(p, {first, 1}, launch, error);
}

// The same by any kernel.
template <typename Element, bool kGated>
cudaError_t launch_gemv_step(const FusedLinearParams& p, int first, int& taken, const Launch& launch) {
  if constexpr (sizeof(Element) == 2) {
    cudaError_t error = cudaSuccess;
    if (launch_stream_step<Element, kGated>(p, first, taken, launch, error)) return error;
  }
  const auto left = static_cast<int>(p.num_tokens) - first;
  const int64_t token_bytes = p.num_inputs * static_cast<int64_t>(sizeof(Element));
  const int64_t norm_bytes = p.norm_weight ? token_bytes : 0;
  const auto fits = [&](int tokens) {
    return left >= tokens && tokens * token_bytes + norm_bytes <= launch.device.shared_bytes_per_block / 2;
  };
  taken = sizeof(Element) == 4 && fits(4) ? 4 : fits(2) ? 2 : 1;
  return launch_gemv_pass<Element, kGated>(p, {first, taken}, launch);
}

// All tokens by few_sm90.cuh, the slices of sums in chains.
template <typename Element, bool kGated>
cudaError_t launch_chain_steps(const FusedLinearParams& p, const Launch& launch) {
  const auto count = static_cast<int>(p.num_tokens);
  for (int first = 0; first < count; first += kFewTokens) {
    const GemvPass pass{first, std::min(count - first, kFewTokens)};
    cudaError_t error = cudaSuccess;
    if (!launch_few_stream<Element, kGated, true>(p, pass, launch, error)) return cudaErrorNotSupported;
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename Element>
cudaError_t launch_chains(const FusedLinearParams& p, const Launch& launch) {
  return p.is_two_part() ? launch_chain_steps<Element, true>(p, launch)
                         : launch_chain_steps<Element, false>(p, launch);
}

template <typename Element>
cudaError_t launch_gemvs(const FusedLinearParams& p, const Launch& launch) {
  const bool regular = is_regular<Element>(p);
  for (int first = 0, taken = 1; first < p.num_tokens; first += taken) {
    const cudaError_t error =
        !regular ? launch_gemv_kernel<Element, odd_gemv_kernel<Element>>(kGemvWarps, p, {first, 1}, launch)
        : p.is_two_part() ? launch_gemv_step<Element, true>(p, first, taken, launch)
                          : launch_gemv_step<Element, false>(p, first, taken, launch);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ortolan::cuda
