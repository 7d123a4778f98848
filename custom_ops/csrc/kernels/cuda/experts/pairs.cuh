// Experts of few pairs of token and choice, at the speed of memory: only their experts' weights are read.
//
// A warp computes an inner feature of one pair (a row of the gate and one of the factor), or a feature of one
// token's result: a row of down of each of its experts, whose products it adds in the order of the choices.
// Its lanes share a row's 16-byte pieces, several of them in flight. Rows that are no whole pieces are read
// element by element. Which experts are chosen is known before the kernel in front of the second product has
// ended: the first lets the second start when it has seen them, and that fetches weights before it waits. A
// sum has one order, whatever the number of tokens.
#pragma once

#include "gate_product.cuh"
#include "instances.h"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/linear/gemv.cuh"

namespace ortolan::cuda {

constexpr int kPairThreads = 256;
constexpr int kPairWarps = kPairThreads / 32;

// Products of kLines rows of weights with a row of inputs each; every lane has all sums. Null rows give 0.
// Inputs may be what the kernel in front writes.
template <typename Element, int kLines, bool kWhole>
__device__ __forceinline__ void dot_lines(const Element* const (&lines)[kLines],
                                          const Element* const (&inputs)[kLines], int size,
                                          float (&sums)[kLines]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (float& sum : sums) sum = 0;
  if constexpr (kWhole) {
    constexpr int kPiece = kPieceSize<Element>, kAtOnce = 4;
    const int pieces = size / kPiece;
    const uint64_t policy = evict_first_policy();
    for (int first = lane; first < pieces; first += kAtOnce * 32) {
      uint4 weights[kLines][kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
        for (int line = 0; line < kLines; ++line)
          if (const int piece = first + n * 32; lines[line] && piece < pieces)
            weights[line][n] = load_weights(lines[line] + piece * kPiece, policy);
      if (first == lane) wait_for_previous_kernel();
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
        for (int line = 0; line < kLines; ++line)
          if (const int piece = first + n * 32; lines[line] && piece < pieces)
            sums[line] =
                add_products(weights[line][n], *reinterpret_cast<const uint4*>(inputs[line] + piece * kPiece),
                             sums[line], Element{});
    }
  } else {
    wait_for_previous_kernel();
    for (int i = lane; i < size; i += 32)
#pragma unroll
      for (int line = 0; line < kLines; ++line)
        if (lines[line]) sums[line] = fmaf(to_float(lines[line][i]), to_float(inputs[line][i]), sums[line]);
  }
#pragma unroll
  for (float& sum : sums) sum = warp_sum(sum);
}

// Block b: rows of pair b / row_blocks.
template <typename Element, bool kWhole>
__global__ void __launch_bounds__(kPairThreads, 2)
    pair_gate_up_kernel(const __grid_constant__ MoeExpertsParams p, Element* inner, unsigned row_blocks) {
  wait_for_previous_kernel();
  launch_dependents();
  const int64_t pair = blockIdx.x / row_blocks;
  const int64_t row = int64_t{blockIdx.x % row_blocks} * kPairWarps + threadIdx.x / 32;
  const int32_t expert = p.experts[pair];
  if (row >= p.inner_size || !exists(p, expert)) return;
  const int64_t gate_row = expert * 2 * p.inner_size + row, factor_row = gate_row + p.inner_size;
  const auto* weights = static_cast<const Element*>(p.gate_up);
  const Element* lines[] = {weights + gate_row * p.hidden_size, weights + factor_row * p.hidden_size};
  const Element* x = static_cast<const Element*>(p.x) + pair / p.top_k * p.hidden_size;
  const Element* inputs[] = {x, x};
  float sums[2];
  dot_lines<Element, 2, kWhole>(lines, inputs, static_cast<int>(p.hidden_size), sums);
  if (threadIdx.x % 32 != 0) return;
  const float gate = sums[0] + element_at<Element>(p.gate_up_bias, gate_row);
  const float factor = sums[1] + element_at<Element>(p.gate_up_bias, factor_row);
  inner[pair * p.inner_size + row] = Element(gate_product(p, gate, factor));
}

// Block b: features of token b / row_blocks.
template <typename Element, bool kWhole>
__global__ void __launch_bounds__(kPairThreads, 2)
    pair_down_kernel(const __grid_constant__ MoeExpertsParams p, const Element* inner, unsigned row_blocks) {
  constexpr int kLines = 4;
  launch_dependents();
  const int64_t token = blockIdx.x / row_blocks;
  const int64_t row = int64_t{blockIdx.x % row_blocks} * kPairWarps + threadIdx.x / 32;
  if (row >= p.hidden_size) return;
  float y = 0;
  for (int64_t first = 0; first < p.top_k; first += kLines) {
    const Element *lines[kLines], *inputs[kLines];
    int64_t down_row[kLines];
#pragma unroll
    for (int n = 0; n < kLines; ++n) {
      const int64_t pair = token * p.top_k + first + n;
      const int32_t expert = first + n < p.top_k ? p.experts[pair] : -1;
      down_row[n] = expert * p.hidden_size + row;
      lines[n] =
          exists(p, expert) ? static_cast<const Element*>(p.down) + down_row[n] * p.inner_size : nullptr;
      inputs[n] = inner + pair * p.inner_size;
    }
    float sums[kLines];
    dot_lines<Element, kLines, kWhole>(lines, inputs, static_cast<int>(p.inner_size), sums);
#pragma unroll
    for (int n = 0; n < kLines; ++n)
      if (lines[n])
        y += p.weights[token * p.top_k + first + n] *
             (sums[n] + element_at<Element>(p.down_bias, down_row[n]));
  }
  wait_for_previous_kernel();  // where no expert exists, and a lane has no piece
  const int64_t place = token * p.hidden_size + row;
  if (threadIdx.x % 32 == 0)
    static_cast<Element*>(p.y)[place] = Element(element_at<Element>(p.residual, place) + y);
}

template <typename Element, bool kWhole>
cudaError_t launch_pair_kernels(const MoeExpertsParams& p, Element* inner, const Launch& launch) {
  const auto inner_blocks = static_cast<unsigned>(divide_up(p.inner_size, kPairWarps));
  const auto hidden_blocks = static_cast<unsigned>(divide_up(p.hidden_size, kPairWarps));
  const auto pairs = static_cast<unsigned>(p.num_tokens * p.top_k);
  const dim3 threads(kPairThreads);
  if (pairs * inner_blocks > 0) {
    const cudaError_t error =
        launch_overlapped(pair_gate_up_kernel<Element, kWhole>, dim3(pairs * inner_blocks), threads, 0,
                          launch, p, inner, inner_blocks);
    if (error != cudaSuccess) return error;
  }
  const dim3 blocks(static_cast<unsigned>(p.num_tokens) * hidden_blocks);
  return launch_overlapped(pair_down_kernel<Element, kWhole>, blocks, threads, 0, launch, p, inner,
                           hidden_blocks);
}

template <typename Element>
cudaError_t launch_pair_experts(const MoeExpertsParams& p, const ExpertScratch& scratch,
                                const Launch& launch) {
  const int64_t row_bits = (p.hidden_size | p.inner_size) * static_cast<int64_t>(sizeof(Element));
  auto* inner = static_cast<Element*>(scratch.inner);
  return has_whole_pieces(row_bits, {p.x, p.gate_up, p.down})
             ? launch_pair_kernels<Element, true>(p, inner, launch)
             : launch_pair_kernels<Element, false>(p, inner, launch);
}

}  // namespace ortolan::cuda
