// Linear layers of low-bit weights. Few tokens: by kernels that read the codes once for 8 or 16 of them.
// Many: the weight becomes elements in scratch memory, and the layer a dense one.
#include <algorithm>

#include "bytes_layers.h"
#include "codes.cuh"
#include "dense_params.h"
#include "dequantise.cuh"
#include "fp8_layers.h"
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/linear/cublas.h"
#include "kernels/cuda/linear/gemv.cuh"
#include "kernels/cuda/operators.generated.h"
#include "stream_layers.h"

namespace ortolan::cuda {

template <typename Element>
cudaError_t launch_low_bit_stream(const LowBitLinearParams& p, const Launch& launch);
template <typename Element>
cudaError_t launch_low_bit_bytes(const LowBitLinearParams& p, const Launch& launch);

namespace {

constexpr int kThreads = 256;
constexpr int kPassTokens = 16;
// Up to here, passes of 16 tokens are faster than a weight of elements.
constexpr int64_t kFewLowBitTokens = 64;
// Of a weight of elements, which waits in scratch memory; larger ones are multiplied in passes.
constexpr int64_t kMaxDenseBytes = int64_t{512} << 20;

// A weight as elements, a row per block. kEights: eight columns at a time.
template <typename Element, bool kEights>
__global__ void __launch_bounds__(kThreads)
    dequantise_kernel(const __grid_constant__ LowBitWeight w, Element* dense, int groups) {
  launch_dependents();
  wait_for_previous_kernel();  // which may still read the scratch memory
  const int64_t row = blockIdx.x;
  const auto columns = static_cast<unsigned>(w.columns), size = static_cast<unsigned>(w.group_size);
  constexpr unsigned kColumns = kEights ? 8 : 1;
  for (unsigned column = threadIdx.x * kColumns; column < columns; column += kThreads * kColumns) {
    const auto group = GroupValues::of(w, row, groups, static_cast<int>(column / size), Element{});
    const int64_t place = row * w.columns + column;
    if constexpr (kEights)
      dequantise_eight(w, place, group, dense);
    else
      dense[place] = Element(group(code_at(w, row, column)));
  }
}

template <typename Element>
cudaError_t launch_dequantise(const LowBitWeight& w, void* dense, const Launch& launch) {
  return launch_overlapped(
      dequantises_eights(w) ? dequantise_kernel<Element, true> : dequantise_kernel<Element, false>,
      dim3(static_cast<unsigned>(w.rows)), dim3(kThreads), 0, launch, w, static_cast<Element*>(dense),
      static_cast<int>(w.groups()));
}

// The sum of a row of the weight for each token of a pass, for the whole warp; lane n gets token n's.
template <typename Element>
__device__ __forceinline__ float row_sums(const FusedLinearParams& p, const LowBitWeight& w,
                                          const GemvPass& pass, int64_t row) {
  const int lane = threadIdx.x % 32;
  const auto* input = static_cast<const Element*>(p.input) + pass.first_token * p.num_inputs;
  float sums[kPassTokens] = {}, mine = 0;
  int known = -1;
  GroupValues group{};
  const auto groups = static_cast<int>(w.groups()), size = static_cast<int>(w.group_size);
  for (int column = lane; column < static_cast<int>(w.columns); column += 32) {
    if (const int n = column / size; n != known)
      group = GroupValues::of(w, row, groups, known = n, Element{});
    const float weight = group(code_at(w, row, column));
#pragma unroll
    for (int token = 0; token < kPassTokens; ++token)
      if (token < pass.num_tokens)
        sums[token] = fmaf(weight, to_float(input[token * p.num_inputs + column]), sums[token]);
  }
#pragma unroll
  for (int token = 0; token < kPassTokens; ++token) {
    const float sum = warp_sum(sums[token]);
    if (lane == token) mine = sum;
  }
  return mine;
}

// For what stream.cuh does not take: an output per warp, inputs from global memory, normalised already.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    low_bit_rows_kernel(const __grid_constant__ FusedLinearParams p, const __grid_constant__ LowBitWeight w,
                        const __grid_constant__ GemvPass pass) {
  launch_dependents();
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32;
  const int64_t output = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (output >= p.num_outputs) return;
  const bool gated = p.activation != GatedActivation::kNone;
  const float gate = row_sums<Element>(p, w, pass, output);
  const float factor = gated ? row_sums<Element>(p, w, pass, p.num_outputs + output) : 0.0f;
  if (lane >= pass.num_tokens) return;
  Element residual{};
  if (p.residual) residual = load_beside<Element>(p, pass.first_token + lane, output);
  store_output<Element>(p, pass.first_token + lane, output, gate, factor, residual);
}

template <typename Element>
cudaError_t launch_low_bit_rows(const LowBitLinearParams& params, const Launch& launch) {
  FusedLinearParams p = dense_params(params);
  if (p.norm_weight) {
    RmsNormAddParams norm;
    norm.element = p.element;
    norm.num_tokens = p.num_tokens;
    norm.row_size = p.num_inputs;
    norm.x = p.input;
    norm.norm_weight = p.norm_weight;
    norm.epsilon = p.epsilon;
    norm.y = launch.workspace;
    if (const cudaError_t error = rms_norm_add(norm, launch); error != cudaSuccess) return error;
    p.input = launch.workspace;
  }
  const auto blocks = static_cast<unsigned>(divide_up(p.num_outputs * 32, kThreads));
  for (int64_t first = 0; first < p.num_tokens; first += kPassTokens) {
    const GemvPass pass{static_cast<int>(first),
                        static_cast<int>(std::min<int64_t>(p.num_tokens - first, kPassTokens))};
    const cudaError_t error = launch_overlapped(low_bit_rows_kernel<Element>, dim3(blocks), dim3(kThreads), 0,
                                                launch, p, params.weight, pass);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

int64_t dense_bytes(const LowBitLinearParams& p) {
  return aligned_bytes(p.weight.rows * p.weight.columns * element_bytes(p.element));
}

// Integer products lead up to 8 tokens, a draft and the token before it; streams lead for more.
bool uses_bytes(const LowBitLinearParams& p, const Device& device) {
  constexpr int64_t kMostTokens = 8;
  return takes_low_bit_bytes(p) && (p.num_tokens <= kMostTokens || !takes_low_bit_stream(p, device));
}

bool is_few(const LowBitLinearParams& p, const Device& device) {
  const bool streams = takes_low_bit_bytes(p) || takes_low_bit_stream(p, device);
  const int64_t few = streams ? kFewLowBitTokens : kPassTokens;
  return p.num_tokens <= few || !p.cublas || dense_bytes(p) > kMaxDenseBytes;
}

}  // namespace

size_t low_bit_linear_workspace(const LowBitLinearParams& params, const Device& device) {
  if (params.input_format == InputFormat::kFp8) return fp8_linear_workspace(params, device);
  if (!is_few(params, device))
    return dense_bytes(params) + fused_linear_workspace(dense_params(params), device);
  if (takes_low_bit_bytes(params) || takes_low_bit_stream(params, device) || !params.norm_weight) return 0;
  return params.num_tokens * params.num_inputs * element_bytes(params.element);
}

cudaError_t low_bit_linear(const LowBitLinearParams& params, const Launch& launch) {
  if (params.num_tokens == 0 || params.num_outputs == 0) return cudaSuccess;
  if (params.input_format == InputFormat::kFp8) return fp8_linear(params, launch);
  if (is_few(params, launch.device)) {
    if (uses_bytes(params, launch.device))
      return params.element == ElementType::kFloat16 ? launch_low_bit_bytes<__half>(params, launch)
                                                     : launch_low_bit_bytes<__nv_bfloat16>(params, launch);
    if (takes_low_bit_stream(params, launch.device))
      return params.element == ElementType::kFloat16 ? launch_low_bit_stream<__half>(params, launch)
                                                     : launch_low_bit_stream<__nv_bfloat16>(params, launch);
    return with_element(params.element,
                        [&]<typename Element>() { return launch_low_bit_rows<Element>(params, launch); });
  }
  const cudaError_t error = with_element(params.element, [&]<typename Element>() {
    return launch_dequantise<Element>(params.weight, launch.workspace, launch);
  });
  if (error != cudaSuccess) return error;
  FusedLinearParams dense = dense_params(params);
  dense.weight = launch.workspace;
  // No kernel of this many tokens reads weights before the one in front of it has ended.
  Launch rest = launch;
  rest.workspace = static_cast<unsigned char*>(launch.workspace) + dense_bytes(params);
  rest.workspace_bytes = launch.workspace_bytes - dense_bytes(params);
  return fused_linear(dense, rest);
}

}  // namespace ortolan::cuda
