// Host side of stream.cuh: two products, each of its own kind.
#pragma once

#include <algorithm>

#include "kernels/cuda/low_bit/stream_kinds.cuh"
#include "stream.cuh"
#include "stream_experts.h"

namespace ortolan::cuda {

template <typename Kind>
cudaError_t launch_expert_stream(ExpertStreamParams params, const Launch& launch) {
  constexpr auto kKernel = expert_stream_kernel<Kind>;
  const auto bytes = [&] {
    return params.first.plan.shared_bytes<1>(1, ExpertStream<Kind>::kDepth, params.pass_pairs);
  };
  const auto resident = [&] { return resident_low_bit_blocks(bytes(), launch.device); };
  params.pass_pairs = params.is_shared ? kStreamPairs : 1;
  while (params.pass_pairs > 1 && resident() < 2) params.pass_pairs /= 2;
  const int64_t pairs = params.step.num_tokens * params.step.top_k;
  const int64_t slots = params.is_shared ? std::min(pairs, params.step.num_experts) : pairs;
  const auto blocks =
      std::min(slots * params.first.plan.tiles, int64_t{resident()} * launch.device.num_multiprocessors);
  if (blocks == 0) return cudaErrorInvalidConfiguration;
  if (const cudaError_t error = allow_shared_memory<kKernel>(launch.device); error != cudaSuccess)
    return error;
  return launch_overlapped(kKernel, dim3(static_cast<unsigned>(blocks)), dim3(kGemvThreads),
                           static_cast<size_t>(bytes()), launch, params);
}

template <typename Element>
cudaError_t launch_expert_streams(const LowBitExpertsParams& p, const ExpertScratch& scratch, bool is_shared,
                                  const Launch& launch) {
  for (const bool gated : {true, false}) {
    const LowBitLinearParams layer = expert_layer(p, gated);
    ExpertStreamParams params{{dense_params(layer), layer.weight, plan_low_bit(layer), {}},
                              gated ? p.gate_up : p.down,
                              p,
                              scratch,
                              gated,
                              is_shared,
                              0};
    const cudaError_t error = with_low_bit_kind<Element>(
        layer.weight, [&]<typename Kind>() { return launch_expert_stream<Kind>(params, launch); });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ortolan::cuda
