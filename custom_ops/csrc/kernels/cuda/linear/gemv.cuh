// Linear layers of one, two or four tokens a launch: each weight is read once, at the speed of memory.
//
// A warp computes an output or two at a time and strides over the rest; its lanes share a row's 16-byte
// pieces, several of them in flight. Weights, which no kernel writes, are fetched before the kernel in front
// has ended, and so are the norm's; inputs, normalised by each block for itself, wait in shared memory. A
// token's sums have one order, whatever the number of tokens.
#pragma once

#include "gates.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/fused_params.h"

namespace ortolan::cuda {

constexpr int kGemvThreads = 256;
constexpr int kGemvWarps = kGemvThreads / 32;

// One pass over some tokens of a call.
struct GemvPass {
  int first_token;
  int num_tokens;
};

// With a policy for L2: a step reads each weight once, so weights leave first, and what is read again stays.
__device__ __forceinline__ uint4 load_weights(const void* address, uint64_t policy) {
  uint4 piece;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;\n"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
               : "l"(address), "l"(policy));
  return piece;
}

// Factors of RMSNorm, from each thread's share of the squares. For the whole block, once.
template <int kTokens>
__device__ __forceinline__ void norm_factors(const FusedLinearParams& p, float (&factors)[kTokens]) {
  block_sums<kGemvThreads>(factors);
#pragma unroll
  for (float& factor : factors) factor = rsqrtf(factor / static_cast<float>(p.num_inputs) + p.epsilon);
}

// Brings inputs to shared memory, normalised and rounded where the layer says so. For the whole block.
template <typename Element, int kTokens>
__device__ __forceinline__ void load_inputs(const FusedLinearParams& p, const GemvPass& pass, uint4* inputs,
                                            const uint4* norm) {
  constexpr int kAtOnce = 4;
  const int pieces = static_cast<int>(p.num_inputs) / kPieceSize<Element>;
  const auto* source =
      reinterpret_cast<const uint4*>(static_cast<const Element*>(p.input) + pass.first_token * p.num_inputs);
  float squares[kTokens] = {};
  for (int first = threadIdx.x; first < pieces; first += kAtOnce * kGemvThreads) {
    uint4 x[kTokens][kAtOnce];
    const auto each_piece = [&](auto visit) {
#pragma unroll
      for (int n = 0; n < kTokens * kAtOnce; ++n)
        if (const int i = first + n % kAtOnce * kGemvThreads; i < pieces)
          visit(n / kAtOnce, n / kAtOnce * pieces + i, x[n / kAtOnce][n % kAtOnce]);
    };
    each_piece([&](int, int place, uint4& piece) { piece = source[place]; });
    each_piece([&](int token, int place, const uint4& piece) {
      inputs[place] = piece;
      squares[token] = add_products(piece, piece, squares[token], Element{});
    });
  }
  if (p.norm_weight) {
    copy_async_wait<0>();
    norm_factors(p, squares);
#pragma unroll
    for (int token = 0; token < kTokens; ++token)
      for (int i = threadIdx.x; i < pieces; i += kGemvThreads) {  // what this thread has written
        uint4& piece = inputs[token * pieces + i];
        piece = scale_piece(piece, squares[token], norm[i], Element{});
      }
  }
  __syncthreads();
}

// Starts to copy the norm's weights to shared memory: the pieces that the thread will use.
template <typename Element>
__device__ __forceinline__ void fetch_norm(const FusedLinearParams& p, uint4* norm) {
  if (!p.norm_weight) return;
  const int pieces = static_cast<int>(p.num_inputs) / kPieceSize<Element>;
  for (int i = threadIdx.x; i < pieces; i += kGemvThreads)
    copy_async_16(norm + i, static_cast<const uint4*>(p.norm_weight) + i, true);
  copy_async_commit();
}

// kLines rows of weights times kTokens inputs, with `kAtOnce` pieces of each row in flight per lane.
template <typename Element, int kTokens, int kLines>
struct GemvRows {
  static constexpr int kPiece = kPieceSize<Element>;
  static constexpr int kAtOnce = kLines >= 4 ? 4 : 8;
  const Element* lines[kLines];
  int pieces;  // of a row
  uint64_t policy;
  float sums[kLines][kTokens];
  uint4 weights[kLines][kAtOnce];

  __device__ __forceinline__ void fetch(int n, int first) {
    const int piece = first + n * 32 + static_cast<int>(threadIdx.x % 32);
    if (piece >= pieces) return;
#pragma unroll
    for (int line = 0; line < kLines; ++line)
      weights[line][n] = load_weights(lines[line] + piece * kPiece, policy);
  }
  __device__ __forceinline__ void fetch_first() {
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) fetch(n, 0);
  }
  // Consumes all pieces of the rows; each that is used makes room for a later one, at last for one of the
  // rows to which `advance` moves, if it says that there are any.
  template <typename Advance>
  __device__ __forceinline__ void multiply(const Element* inputs, Advance advance) {
#pragma unroll
    for (int n = 0; n < kLines * kTokens; ++n) sums[n / kTokens][n % kTokens] = 0;
#pragma unroll 1
    for (int first = 0; first < pieces; first += kAtOnce * 32) {
      const bool is_last = first + kAtOnce * 32 >= pieces;
      const bool fetches = !is_last || advance();
      const int later = is_last ? 0 : first + kAtOnce * 32;
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int piece = first + n * 32 + static_cast<int>(threadIdx.x % 32);
        if (piece < pieces) {
#pragma unroll
          for (int token = 0; token < kTokens; ++token) {
            const uint4 x = *reinterpret_cast<const uint4*>(inputs + (token * pieces + piece) * kPiece);
#pragma unroll
            for (int line = 0; line < kLines; ++line)
              sums[line][token] = add_products(weights[line][n], x, sums[line][token], Element{});
          }
        }
        if (fetches) fetch(n, later);
      }
    }
  }
};

__device__ __forceinline__ bool has_beside(const FusedLinearParams& p) { return p.residual || p.factor; }

// What stands beside an output: its residual, or the factor that its gate lets through.
template <typename Element>
__device__ __forceinline__ Element load_beside(const FusedLinearParams& p, int64_t token, int64_t output) {
  const void* beside = p.factor ? p.factor : p.residual;
  const int64_t stride = p.factor ? p.factor_stride : p.num_outputs;
  return static_cast<const Element*>(beside)[token * stride + output];
}

// `kNearly`: activations of results of 16 bits are those of rows_sm90.cuh. `factor`: the second part's
// product.
template <typename Element, bool kNearly = false>
__device__ __forceinline__ void store_output(const FusedLinearParams& p, int64_t token, int64_t output,
                                             float gate, float factor, Element beside) {
  const auto* bias = static_cast<const Element*>(p.bias);
  const int64_t index = token * p.num_outputs + output;
  if (bias) gate += to_float(bias[output]);
  float y = gate;
  if (p.activation != GatedActivation::kNone)
    y = (kNearly && !p.output_float32 ? activate_nearly(p.activation, gate) : activate(p.activation, gate)) *
        (p.factor ? to_float(beside) : factor + (bias ? to_float(bias[p.num_outputs + output]) : 0.0f));
  if (p.residual) y += to_float(beside);
  if (p.output_float32)
    store_kept(static_cast<float*>(p.output) + index, y);
  else
    store_kept(static_cast<Element*>(p.output) + index, Element(y));
}

// `kOutputs` per warp and turn; a gated layer reads two rows for each.
template <typename Element, int kTokens, int kOutputs, bool kGated>
__global__ void __launch_bounds__(kGemvThreads, 2)
    gemv_kernel(const __grid_constant__ FusedLinearParams p, const __grid_constant__ GemvPass pass) {
  constexpr int kLines = kGated ? 2 * kOutputs : kOutputs;
  using Rows = GemvRows<Element, kTokens, kLines>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  auto* inputs = reinterpret_cast<Element*>(shared_memory);
  auto* norm = reinterpret_cast<uint4*>(inputs + kTokens * p.num_inputs);
  const int lane = threadIdx.x % 32;
  const int64_t stride = int64_t{gridDim.x} * kGemvWarps * kOutputs;
  int64_t output = (int64_t{blockIdx.x} * kGemvWarps + threadIdx.x / 32) * kOutputs;

  Rows rows;
  rows.pieces = static_cast<int>(p.num_inputs) / Rows::kPiece;
  rows.policy = evict_first_policy();
  const auto aim = [&] {
    if (output >= p.num_outputs) return false;
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      const int64_t row = min(output + line % kOutputs, p.num_outputs - 1) + line / kOutputs * p.num_outputs;
      rows.lines[line] = static_cast<const Element*>(p.weight) + row * p.num_inputs;
    }
    return true;
  };
  if (aim()) rows.fetch_first();
  fetch_norm<Element>(p, norm);
  launch_dependents();
  wait_for_previous_kernel();
  load_inputs<Element, kTokens>(p, pass, reinterpret_cast<uint4*>(inputs), norm);

  while (output < p.num_outputs) {
    const int64_t finished = output;
    Element beside[kOutputs];  // of the lane's token
#pragma unroll
    for (int n = 0; n < kOutputs; ++n)
      if (has_beside(p) && lane < pass.num_tokens && finished + n < p.num_outputs)
        beside[n] = load_beside<Element>(p, pass.first_token + lane, finished + n);
    rows.multiply(inputs, [&] {
      output += stride;
      return aim();
    });
#pragma unroll
    for (int n = 0; n < kOutputs; ++n)
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        const float gate = warp_sum(rows.sums[n][token]);
        const float factor = kGated ? warp_sum(rows.sums[kLines - kOutputs + n][token]) : 0.0f;
        if (lane == token && token < pass.num_tokens && finished + n < p.num_outputs)
          store_output<Element>(p, pass.first_token + token, finished + n, gate, factor, beside[n]);
      }
  }
}

// For rows that are no whole pieces: one token, an output per warp, an element at a time.
template <typename Element>
__global__ void __launch_bounds__(kGemvThreads, 2)
    odd_gemv_kernel(const __grid_constant__ FusedLinearParams p, const __grid_constant__ GemvPass pass) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  auto* inputs = reinterpret_cast<Element*>(shared_memory);
  const auto size = static_cast<int>(p.num_inputs);
  const int lane = threadIdx.x % 32;
  const int64_t output = int64_t{blockIdx.x} * kGemvWarps + threadIdx.x / 32;
  launch_dependents();
  wait_for_previous_kernel();
  const auto* source = static_cast<const Element*>(p.input) + pass.first_token * p.num_inputs;
  const auto* norm = static_cast<const Element*>(p.norm_weight);
  float factors[1] = {};
  for (int i = threadIdx.x; i < size; i += kGemvThreads) {
    inputs[i] = source[i];
    factors[0] = fmaf(to_float(source[i]), to_float(source[i]), factors[0]);
  }
  if (norm) {
    norm_factors(p, factors);
    for (int i = threadIdx.x; i < size; i += kGemvThreads)
      inputs[i] = Element(to_float(inputs[i]) * factors[0] * to_float(norm[i]));
  }
  __syncthreads();
  if (output >= p.num_outputs) return;
  const bool gated = p.is_two_part();
  const auto* line = static_cast<const Element*>(p.weight) + output * size;
  float gate = 0, factor = 0;
  for (int i = lane; i < size; i += 32) {
    const float x = to_float(inputs[i]);
    gate = fmaf(to_float(line[i]), x, gate);
    if (gated) factor = fmaf(to_float(line[p.num_outputs * size + i]), x, factor);
  }
  gate = warp_sum(gate);
  factor = warp_sum(factor);
  if (lane > 0) return;
  const Element beside = has_beside(p) ? load_beside<Element>(p, pass.first_token, output) : Element{};
  store_output<Element>(p, pass.first_token, output, gate, factor, beside);
}

template <typename Element, auto kKernel>
cudaError_t launch_gemv_kernel(int64_t outputs_per_block, const FusedLinearParams& p, const GemvPass& pass,
                               const Launch& launch) {
  const int64_t shared_rows = pass.num_tokens + (p.norm_weight ? 1 : 0);
  const auto shared_bytes = static_cast<int>(shared_rows * p.num_inputs * sizeof(Element));
  if (const cudaError_t error = allow_shared_memory<kKernel>(launch.device); error != cudaSuccess)
    return error;
  const int64_t blocks = (p.num_outputs + outputs_per_block - 1) / outputs_per_block;
  return launch_overlapped(kKernel, dim3(static_cast<unsigned>(blocks)), dim3(kGemvThreads), shared_bytes,
                           launch, p, pass);
}

// Whether rows are whole, aligned pieces.
template <typename Element>
bool is_regular(const FusedLinearParams& p) {
  uint64_t bits = static_cast<uint64_t>(p.num_inputs) * sizeof(Element);
  for (const void* data : {p.weight, p.input, p.norm_weight}) bits |= reinterpret_cast<uint64_t>(data);
  return bits % 16 == 0;
}

template <typename Element, bool kGated>
cudaError_t launch_gemv_pass(const FusedLinearParams& p, const GemvPass& pass, const Launch& launch) {
  // Few outputs: one per warp, so that enough warps have loads in flight. Many: warps that stay for several.
  const int64_t resident = int64_t{2} * launch.device.num_multiprocessors;
  const auto outputs = [&](int64_t per_turn) {
    const int64_t turns = (p.num_outputs + resident * per_turn - 1) / (resident * per_turn);
    return per_turn * (turns > 0 ? turns : 1);
  };
  if constexpr (sizeof(Element) == 4)
    if (pass.num_tokens == 4)
      return launch_gemv_kernel<Element, gemv_kernel<Element, 4, 1, kGated>>(outputs(kGemvWarps), p, pass,
                                                                             launch);
  if (pass.num_tokens == 2)
    return launch_gemv_kernel<Element, gemv_kernel<Element, 2, 1, kGated>>(outputs(kGemvWarps), p, pass,
                                                                           launch);
  if (!kGated && p.num_outputs > resident * kGemvWarps)
    return launch_gemv_kernel<Element, gemv_kernel<Element, 1, 2, kGated>>(outputs(2 * kGemvWarps), p, pass,
                                                                           launch);
  return launch_gemv_kernel<Element, gemv_kernel<Element, 1, 1, kGated>>(outputs(kGemvWarps), p, pass,
                                                                         launch);
}

}  // namespace ortolan::cuda
