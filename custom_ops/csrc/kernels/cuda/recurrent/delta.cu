// GatedDeltaRule on CUDA: every sequence goes to the steps or to the chunks by its own number of tokens.
#include <algorithm>

#include "delta_chunks.cuh"
#include "delta_steps.cuh"
#include "instances.h"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {
namespace {

constexpr int64_t kRoundBytes = 176 << 20;  // of scratch: more rounds cost more, and fewer more memory

template <typename Element, int kRows>
cudaError_t launch_steps_of(const GatedDeltaRuleParams& p, bool reads_long, const Launch& launch) {
  const bool whole = has_whole_pieces(p.value_size * sizeof(float), {p.state, p.recent_updates}) &&
                     has_whole_pieces(p.key_size * sizeof(float), {p.recent_keys});
  const int64_t most =
      std::min<int64_t>(kDeltaTile, divide_up(p.packing.num_tokens, p.packing.num_sequences));
  const dim3 grid(static_cast<unsigned>(divide_up(p.value_size, kDeltaColumns)),
                  static_cast<unsigned>(p.num_value_heads), static_cast<unsigned>(p.packing.num_sequences));
  const size_t shared_bytes = (2 * most + p.recent_tokens) * kRows * kDeltaGroups * sizeof(float);
  const auto launch_steps = [&]<bool kWhole>() {
    constexpr auto kKernel = delta_steps<Element, kRows, kWhole>;
    const cudaError_t error = allow_shared_memory<kKernel>(launch.device);
    if (error != cudaSuccess) return error;
    return launch_overlapped(kKernel, grid, dim3(kDeltaThreads), shared_bytes, launch, p,
                             static_cast<int>(most), reads_long);
  };
  const cudaError_t error =
      whole ? launch_steps.template operator()<true>() : launch_steps.template operator()<false>();
  if (error != cudaSuccess) return error;
  const dim3 pairs(static_cast<unsigned>(divide_up(most * p.num_key_heads, kDeltaThreads / 32)),
                   static_cast<unsigned>(p.packing.num_sequences));
  return launch_overlapped(finish_steps<Element>, pairs, dim3(kDeltaThreads), 0, launch, p);
}

}  // namespace

cudaError_t launch_delta_steps(const GatedDeltaRuleParams& p, bool reads_long, const Launch& launch) {
  return with_element(p.element, [&]<typename Element>() {
    if (p.key_size <= 4 * kDeltaGroups) return launch_steps_of<Element, 4>(p, reads_long, launch);
    if (p.key_size <= 8 * kDeltaGroups) return launch_steps_of<Element, 8>(p, reads_long, launch);
    return launch_steps_of<Element, 16>(p, reads_long, launch);
  });
}

bool delta_chunks_take(const GatedDeltaRuleParams& p, const Device& device) {
  const bool sizes = p.key_size == 64 || p.key_size == 96 || p.key_size == 128;
  const bool aligned = has_whole_pieces(16, {p.query, p.key, p.value, p.output, p.state});
  return p.element != ElementType::kFloat32 && p.packing.num_tokens > p.recent_tokens && sizes &&
         p.value_size % kDeltaColumns == 0 && aligned && device.compute_capability >= 80;
}

size_t delta_chunks_workspace(const GatedDeltaRuleParams& p) {
  const int64_t chunk = ChunkScratch<__half>::bytes(p) * p.num_value_heads;
  const int64_t numbers = count_chunks(p);
  return chunk * std::min(numbers, std::max<int64_t>(1, kRoundBytes / chunk));
}

size_t gated_delta_rule_workspace(const GatedDeltaRuleParams& p, const Device& device) {
  return delta_chunks_take(p, device) ? delta_chunks_workspace(p) : 0;
}

cudaError_t gated_delta_rule(const GatedDeltaRuleParams& p, const Launch& launch) {
  if (p.packing.num_tokens == 0 || p.packing.num_sequences == 0) return cudaSuccess;
  const bool chunked = delta_chunks_take(p, launch.device);
  const cudaError_t error = launch_delta_steps(p, !chunked, launch);
  if (error != cudaSuccess || !chunked) return error;
  return with_half_element(p.element,
                           [&]<typename Element>() { return launch_delta_chunks<Element>(p, launch); });
}

}  // namespace ortolan::cuda
