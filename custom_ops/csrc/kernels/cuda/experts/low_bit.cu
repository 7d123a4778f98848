// LowBitExperts: which kernels take a call. Few pairs of token and choice: those that stream the codes of the
// chosen experts, as bytes (the fewest) or elements. Many: the weights of some experts at a time become
// elements in scratch memory, if a token chose them, and the experts dense ones. All else, float32 and odd
// sizes: a warp per output.
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/low_bit/dequantise.cuh"
#include "kernels/cuda/operators.generated.h"
#include "low_bit_rows.cuh"
#include "slices.h"
#include "stream_experts.h"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// With more tokens, pairs that share an expert read it together, unless hardly any pairs do.
constexpr int64_t kAloneTokens = 2;
// Up to here, passes over the codes are faster than weights of elements.
constexpr int64_t kFewPairsPerExpert = 32;
// Of weights of elements, which wait in scratch memory.
constexpr int64_t kMaxDenseBytes = int64_t{512} << 20;

enum class Family { kStream, kDense, kRows };

bool takes_dense(const LowBitExpertsParams& p) {
  return takes_grouped_experts(p) && dequantises_eights(p.gate_up.first) && dequantises_eights(p.down.first);
}

Family family_of(const LowBitExpertsParams& p, const Device& device) {
  const bool few = p.num_tokens * p.top_k <= p.num_experts * kFewPairsPerExpert;
  const bool streams = takes_expert_stream(p, device), dense = takes_dense(p);
  if (streams && (few || !dense)) return Family::kStream;
  return dense ? Family::kDense : Family::kRows;
}

// Experts whose weights are elements at a time.
int64_t dense_experts(const LowBitExpertsParams& p, bool gated) {
  const int64_t bytes = (gated ? 2 : 1) * p.inner_size * p.hidden_size * 2;
  return std::clamp<int64_t>(kMaxDenseBytes / bytes, 1, p.num_experts);
}
int64_t dense_bytes(const LowBitExpertsParams& p) {
  return p.inner_size * p.hidden_size * 2 * std::max(2 * dense_experts(p, true), dense_experts(p, false));
}

// The weights of the experts that have pairs, eight columns at a time. A warp per row.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    dequantise_kernel(const __grid_constant__ StackedWeight weights, const int32_t* offsets, int first_expert,
                      Element* dense) {
  launch_dependents();
  wait_for_previous_kernel();
  const int place = static_cast<int>(blockIdx.y), expert = first_expert + place;
  const int64_t rows = weights.first.rows, row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= rows || offsets[expert] == offsets[expert + 1]) return;
  const LowBitWeight w = weights.of(expert);
  const auto columns = static_cast<int>(w.columns), size = static_cast<int>(w.group_size);
  const auto groups = static_cast<int>(w.groups());
#pragma unroll 2
  for (int column = threadIdx.x % 32 * 8; column < columns; column += 32 * 8) {
    const auto group = GroupValues::of(w, row, groups, column / size, Element{});
    dequantise_eight(w, row * columns + column, group, dense + place * rows * columns);
  }
}

template <typename Element>
cudaError_t launch_dequantise(const StackedWeight& weights, const int32_t* offsets, int64_t first,
                              int64_t count, void* dense, const Launch& launch) {
  const dim3 blocks(static_cast<unsigned>(divide_up(weights.first.rows, kWarps)),
                    static_cast<unsigned>(count));
  return launch_overlapped(dequantise_kernel<Element>, blocks, dim3(kThreads), 0, launch, weights, offsets,
                           static_cast<int>(first), static_cast<Element*>(dense));
}

// A call of the experts from `first` on, whose weights are elements.
MoeExpertsParams dense_call(const LowBitExpertsParams& p, int64_t first, int64_t count, const void* weights) {
  const auto moved = [](const void* bias, int64_t elements) {
    return bias ? static_cast<const char*>(bias) + elements * 2 : nullptr;
  };
  MoeExpertsParams dense{p};
  dense.num_experts = count;
  dense.gate_up = dense.down = weights;
  dense.gate_up_bias = moved(p.gate_up_bias, first * 2 * p.inner_size);
  dense.down_bias = moved(p.down_bias, first * p.hidden_size);
  return dense;
}

cudaError_t multiply_some(const LowBitExpertsParams& p, ExpertScratch scratch, int64_t first, bool gated,
                          void* dense, const Launch& launch) {
  const int64_t count = std::min(dense_experts(p, gated), p.num_experts - first);
  const cudaError_t error = with_half_element(p.element, [&]<typename Element>() {
    return launch_dequantise<Element>(gated ? p.gate_up : p.down, scratch.offsets, first, count, dense,
                                      launch);
  });
  if (error != cudaSuccess) return error;
  scratch.offsets += first;
  return launch_expert_product(dense_call(p, first, count, dense), scratch, gated, launch);
}

cudaError_t multiply_dense(const LowBitExpertsParams& p, const ExpertScratch& scratch, void* dense,
                           const Launch& launch) {
  cudaError_t error = launch_expert_lists(p, scratch, launch);
  if (error == cudaSuccess) error = launch_expert_inputs(p, scratch, launch);
  for (const bool gated : {true, false})
    for (int64_t first = 0; first < p.num_experts; first += dense_experts(p, gated))
      if (error == cudaSuccess) error = multiply_some(p, scratch, first, gated, dense, launch);
  return error == cudaSuccess ? launch_combine(p, scratch, launch) : error;
}

bool shares_experts(const LowBitExpertsParams& p) {
  if (p.num_tokens <= kAloneTokens) return false;
  return !takes_expert_bytes(p) || 2 * p.num_tokens * p.top_k > p.num_experts;
}

cudaError_t multiply_streamed(const LowBitExpertsParams& p, const ExpertScratch& scratch,
                              const Launch& launch) {
  const bool is_shared = shares_experts(p);
  cudaError_t error = is_shared ? launch_expert_lists(p, scratch, launch) : cudaSuccess;
  if (error == cudaSuccess)
    error = with_half_element(p.element, [&]<typename Element>() {
      return takes_expert_bytes(p) ? launch_expert_bytes<Element>(p, scratch, is_shared, launch)
                                   : launch_expert_streams<Element>(p, scratch, is_shared, launch);
    });
  return error == cudaSuccess ? launch_combine(p, scratch, launch) : error;
}

}  // namespace

size_t low_bit_experts_workspace(const LowBitExpertsParams& params, const Device& device) {
  if (params.num_tokens == 0) return 0;
  const Family family = family_of(params, device);
  const int64_t bytes = ExpertSlices::of(params, family != Family::kRows).bytes();
  return family == Family::kDense ? bytes + dense_bytes(params) : bytes;
}

cudaError_t low_bit_experts(const LowBitExpertsParams& params, const Launch& launch) {
  if (params.num_tokens == 0 || params.hidden_size == 0) return cudaSuccess;
  const Family family = family_of(params, launch.device);
  const ExpertSlices slices = ExpertSlices::of(params, family != Family::kRows);
  const ExpertScratch scratch = slices.scratch(launch.workspace);
  void* dense = static_cast<char*>(launch.workspace) + slices.bytes();
  return slices.each(params, [&](const LowBitExpertsParams& p) {
    if (family == Family::kStream) return multiply_streamed(p, scratch, launch);
    if (family == Family::kDense) return multiply_dense(p, scratch, dense, launch);
    return with_element(p.element, [&]<typename Element>() {
      return launch_low_bit_rows<Element>(p, scratch.inner, launch);
    });
  });
}

}  // namespace ortolan::cuda
