// Which kernel multiplies one or two tokens.
#pragma once

#include "gemv.cuh"
#include "gemv_sm90.cuh"

namespace ortolan::cuda {

// Multiplies the tokens from `first` on, one or two of them; `taken` says how many.
template <typename Element, bool kGated>
cudaError_t launch_gemv_step(const FusedLinearParams& p, int first, int& taken, const Launch& launch) {
  const auto left = static_cast<int>(p.num_tokens) - first;
  if constexpr (sizeof(Element) == 2) {
    cudaError_t error = cudaSuccess;
    taken = 2;
    if (left >= 2 && launch_gemv_stream<Element, 2, kGated>(p, {first, 2}, launch, error)) return error;
    taken = 1;
    if (launch_gemv_stream<Element, 1, kGated>(p, {first, 1}, launch, error)) return error;
  }
  const int64_t token_bytes = p.num_inputs * static_cast<int64_t>(sizeof(Element));
  const int64_t norm_bytes = p.norm_weight ? token_bytes : 0;
  taken = left >= 2 && 2 * token_bytes + norm_bytes <= launch.device.shared_bytes_per_block / 2 ? 2 : 1;
  return launch_gemv_pass<Element, kGated>(p, {first, taken}, launch);
}

template <typename Element>
cudaError_t launch_gemvs(const FusedLinearParams& p, const Launch& launch) {
  const bool regular = is_regular<Element>(p);
  for (int first = 0, taken = 1; first < p.num_tokens; first += taken) {
    const cudaError_t error =
        !regular ? launch_gemv_kernel<Element, odd_gemv_kernel<Element>>(kGemvWarps, p, {first, 1}, launch)
        : p.activation == GatedActivation::kNone ? launch_gemv_step<Element, false>(p, first, taken, launch)
                                                 : launch_gemv_step<Element, true>(p, first, taken, launch);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ortolan::cuda
