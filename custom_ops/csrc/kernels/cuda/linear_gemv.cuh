// Linear layers of a few tokens, at the speed of memory: each weight is read once, for all tokens.
//
// A warp computes a few outputs at a time and strides over the rest; its lanes share a row's 16-byte pieces.
// Weights that no kernel writes are fetched before the kernel in front has ended; inputs, normalised by each
// block for itself, wait in shared memory. A token's sums have one order, whatever the number of tokens.
#pragma once

#include "elements.cuh"
#include "gates.cuh"
#include "launch.cuh"
#include "linear.h"
#include "ptx.cuh"

namespace ortolan::cuda {

constexpr int kGemvThreads = 256;
constexpr int kGemvWarps = kGemvThreads / 32;

// One pass over some tokens of a call.
struct GemvPass {
  int first_token;
  int num_tokens;
};

__device__ __forceinline__ uint4 load_weights(const void* address) {
  uint4 piece;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
               : "l"(address));
  return piece;
}

// Brings the pass's inputs to shared memory, normalised and rounded where the layer says so. For the whole
// block.
template <typename Element>
__device__ __forceinline__ void load_inputs(const FusedLinearParams& p, const GemvPass& pass,
                                            Element* inputs) {
  const int size = static_cast<int>(p.num_inputs);
  const int lane = threadIdx.x % 32;
  const auto* source = static_cast<const Element*>(p.input) + pass.first_token * p.num_inputs;
  const auto* norm = static_cast<const Element*>(p.norm_weight);
  __shared__ float squares[kGemvWarps];
  for (int token = 0; token < pass.num_tokens; ++token) {
    Element* target = inputs + token * size;
    float sum = 0;
    for (int i = threadIdx.x; i < size; i += kGemvThreads) {
      const Element x = source[token * static_cast<int64_t>(size) + i];
      target[i] = x;
      sum = fmaf(to_float(x), to_float(x), sum);
    }
    if (!norm) continue;
    sum = warp_sum(sum);
    if (lane == 0) squares[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int w = 0; w < kGemvWarps; ++w) total += squares[w];
    const float factor = rsqrtf(total / static_cast<float>(size) + p.epsilon);
    for (int i = threadIdx.x; i < size; i += kGemvThreads)
      target[i] = Element(to_float(target[i]) * factor * to_float(norm[i]));
    __syncthreads();
  }
  __syncthreads();
}

// kLines rows of weights times kTokens inputs.
template <typename Element, int kTokens, int kLines>
struct GemvRows {
  static constexpr int kPiece = kPieceSize<Element>;
  static constexpr int kAtOnce = kLines >= 4 ? 2 : 8 / kLines;  // pieces of a row in flight per lane
  float sums[kLines][kTokens];
  uint4 weights[kLines][kAtOnce];

  __device__ __forceinline__ void fetch(const Element* const (&rows)[kLines], int pieces, int first) {
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int piece = first + n * 32 + static_cast<int>(threadIdx.x % 32);
#pragma unroll
      for (int line = 0; line < kLines; ++line)
        weights[line][n] =
            piece < pieces ? load_weights(rows[line] + piece * kPiece) : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void accumulate(const Element* inputs, int size, int tokens, int pieces,
                                             int first) {
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int piece = first + n * 32 + static_cast<int>(threadIdx.x % 32);
      if (piece >= pieces) return;
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token >= tokens) break;
        const uint4 x = *reinterpret_cast<const uint4*>(inputs + token * size + piece * kPiece);
#pragma unroll
        for (int line = 0; line < kLines; ++line)
          sums[line][token] = add_products(weights[line][n], x, sums[line][token], Element{});
      }
    }
  }
};

template <typename Element>
__device__ __forceinline__ void store_output(const FusedLinearParams& p, int64_t token, int64_t output,
                                             float gate, float factor) {
  const auto* bias = static_cast<const Element*>(p.bias);
  const int64_t index = token * p.num_outputs + output;
  if (bias) gate += to_float(bias[output]);
  float y = gate;
  if (p.activation != GatedActivation::kNone)
    y = activate(p.activation, gate) * (factor + (bias ? to_float(bias[p.num_outputs + output]) : 0.0f));
  if (p.residual) y += to_float(static_cast<const Element*>(p.residual)[index]);
  if (p.output_float32)
    static_cast<float*>(p.output)[index] = y;
  else
    static_cast<Element*>(p.output)[index] = Element(y);
}

// `kOutputs` per warp and turn; a gated layer reads two rows for each.
template <typename Element, int kTokens, int kOutputs, bool kGated>
__global__ void __launch_bounds__(kGemvThreads)
    gemv_kernel(const __grid_constant__ FusedLinearParams p, const __grid_constant__ GemvPass pass) {
  constexpr int kLines = kGated ? 2 * kOutputs : kOutputs;
  using Rows = GemvRows<Element, kTokens, kLines>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  auto* inputs = reinterpret_cast<Element*>(shared_memory);
  const auto size = static_cast<int>(p.num_inputs);
  const int pieces = size / Rows::kPiece;
  const int lane = threadIdx.x % 32;
  const int64_t stride = int64_t{gridDim.x} * kGemvWarps * kOutputs;
  int64_t output = (int64_t{blockIdx.x} * kGemvWarps + threadIdx.x / 32) * kOutputs;

  Rows rows;
  const Element* lines[kLines];
  const auto seek = [&] {
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      const int64_t row =
          min(output + line % kOutputs, p.num_outputs - 1) + (line / kOutputs) * p.num_outputs;
      lines[line] = static_cast<const Element*>(p.weight) + row * size;
    }
  };
  seek();
  if (output < p.num_outputs) rows.fetch(lines, pieces, 0);
  launch_dependents();
  wait_for_previous_kernel();
  load_inputs(p, pass, inputs);

  for (; output < p.num_outputs;) {
#pragma unroll
    for (int line = 0; line < kLines; ++line)
#pragma unroll
      for (int token = 0; token < kTokens; ++token) rows.sums[line][token] = 0;
    for (int first = 0;;) {
      rows.accumulate(inputs, size, pass.num_tokens, pieces, first);
      first += Rows::kAtOnce * 32;
      if (first >= pieces) break;
      rows.fetch(lines, pieces, first);
    }
    const int64_t finished = output;
    output += stride;
    seek();
    if (output < p.num_outputs) rows.fetch(lines, pieces, 0);
#pragma unroll
    for (int n = 0; n < kOutputs; ++n)
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        const float gate = warp_sum(rows.sums[n][token]);
        const float factor = kGated ? warp_sum(rows.sums[kLines - kOutputs + n][token]) : 0.0f;
        if (lane == token && token < pass.num_tokens && finished + n < p.num_outputs)
          store_output<Element>(p, pass.first_token + token, finished + n, gate, factor);
      }
  }
}

// For rows that are no whole pieces: an output per warp, an element at a time.
template <typename Element>
__global__ void __launch_bounds__(kGemvThreads)
    odd_gemv_kernel(const __grid_constant__ FusedLinearParams p, const __grid_constant__ GemvPass pass) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  auto* inputs = reinterpret_cast<Element*>(shared_memory);
  const auto size = static_cast<int>(p.num_inputs);
  const int lane = threadIdx.x % 32;
  const int64_t output = int64_t{blockIdx.x} * kGemvWarps + threadIdx.x / 32;
  launch_dependents();
  wait_for_previous_kernel();
  load_inputs(p, pass, inputs);
  if (output >= p.num_outputs) return;
  const bool gated = p.activation != GatedActivation::kNone;
  const auto* line = static_cast<const Element*>(p.weight) + output * size;
  for (int token = 0; token < pass.num_tokens; ++token) {
    float gate = 0, factor = 0;
    for (int i = lane; i < size; i += 32) {
      const float x = to_float(inputs[token * size + i]);
      gate = fmaf(to_float(line[i]), x, gate);
      if (gated) factor = fmaf(to_float(line[p.num_outputs * size + i]), x, factor);
    }
    gate = warp_sum(gate);
    factor = warp_sum(factor);
    if (lane == 0) store_output<Element>(p, pass.first_token + token, output, gate, factor);
  }
}

// Tokens of a pass: as many as fit into what two resident blocks have of shared memory, at least one.
inline int gemv_tokens(const FusedLinearParams& p, const Device& device) {
  const int64_t token_bytes = p.num_inputs * element_bytes(p.element);
  const int64_t fit = device.shared_bytes_per_block / 2 / (token_bytes > 0 ? token_bytes : 1);
  return static_cast<int>(fit < 1 ? 1 : fit > 8 ? 8 : fit);
}

template <typename Element, int kTokens, int kOutputs, bool kGated>
cudaError_t launch_gemv(const FusedLinearParams& p, const GemvPass& pass, const Launch& launch) {
  const auto kernel = gemv_kernel<Element, kTokens, kOutputs, kGated>;
  const auto shared_bytes = static_cast<int>(pass.num_tokens * p.num_inputs * sizeof(Element));
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const int64_t needed = (p.num_outputs + kGemvWarps * kOutputs - 1) / (kGemvWarps * kOutputs);
  const int64_t resident = int64_t{4} * launch.device.num_multiprocessors;
  const dim3 blocks(static_cast<unsigned>(needed < resident ? needed : resident));
  return launch_overlapped(kernel, blocks, dim3(kGemvThreads), shared_bytes, launch, p, pass);
}

template <typename Element>
cudaError_t launch_odd_gemv(const FusedLinearParams& p, const GemvPass& pass, const Launch& launch) {
  const auto shared_bytes = static_cast<int>(pass.num_tokens * p.num_inputs * sizeof(Element));
  const cudaError_t error = cudaFuncSetAttribute(odd_gemv_kernel<Element>,
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const dim3 blocks(static_cast<unsigned>((p.num_outputs + kGemvWarps - 1) / kGemvWarps));
  return launch_overlapped(odd_gemv_kernel<Element>, blocks, dim3(kGemvThreads), shared_bytes, launch, p,
                           pass);
}

template <typename Element, bool kGated>
cudaError_t launch_gemv_pass(const FusedLinearParams& p, const GemvPass& pass, const Launch& launch) {
  const uint64_t bits =
      static_cast<uint64_t>(p.num_inputs * sizeof(Element)) | reinterpret_cast<uint64_t>(p.weight);
  if (bits % 16) return launch_odd_gemv<Element>(p, pass, launch);
  // Few outputs: one per warp, so that enough warps have loads in flight.
  const bool many = p.num_outputs >= int64_t{4} * 2 * kGemvWarps * launch.device.num_multiprocessors;
  if (pass.num_tokens == 1)
    return many && !kGated ? launch_gemv<Element, 1, 2, kGated>(p, pass, launch)
                           : launch_gemv<Element, 1, 1, kGated>(p, pass, launch);
  if (pass.num_tokens <= 4) return launch_gemv<Element, 4, 2, kGated>(p, pass, launch);
  return launch_gemv<Element, 8, 2, kGated>(p, pass, launch);
}

template <typename Element>
cudaError_t launch_gemvs(const FusedLinearParams& p, const Launch& launch) {
  const int most = gemv_tokens(p, launch.device);
  for (int first = 0; first < p.num_tokens; first += most) {
    const GemvPass pass{first, static_cast<int>(p.num_tokens - first < most ? p.num_tokens - first : most)};
    const cudaError_t error = p.activation == GatedActivation::kNone
                                  ? launch_gemv_pass<Element, false>(p, pass, launch)
                                  : launch_gemv_pass<Element, true>(p, pass, launch);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ortolan::cuda
