// Experts of low-bit weights of any type and size: a warp per output, its lanes by turns at the columns. A
// sum has one order, whatever the number of tokens.
#pragma once

#include "gate_product.cuh"
#include "instances.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/low_bit/codes.cuh"

namespace ortolan::cuda {

constexpr int kRowThreads = 256;

// The product of a row of the weight with inputs, in every lane.
template <typename Element>
__device__ __forceinline__ float low_bit_row(const LowBitWeight& w, int64_t row, const Element* inputs) {
  float sum = 0;
  int known = -1;
  GroupValues group{};
  const auto groups = static_cast<int>(w.groups()), size = static_cast<int>(w.group_size);
  for (int column = threadIdx.x % 32; column < static_cast<int>(w.columns); column += 32) {
    if (const int n = column / size; n != known)
      group = GroupValues::of(w, row, groups, known = n, Element{});
    sum = fmaf(group(code_at(w, row, column)), to_float(inputs[column]), sum);
  }
  return warp_sum(sum);
}

// Warp w: inner feature w % I of pair w / I.
template <typename Element>
__global__ void __launch_bounds__(kRowThreads)
    low_bit_gate_up_kernel(const __grid_constant__ LowBitExpertsParams p, Element* inner) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t place = (int64_t{blockIdx.x} * kRowThreads + threadIdx.x) / 32;
  if (place >= p.num_tokens * p.top_k * p.inner_size) return;
  const int64_t pair = place / p.inner_size, row = place % p.inner_size;
  const int32_t expert = p.experts[pair];
  if (!exists(p, expert)) return;
  const LowBitWeight w = p.gate_up.of(expert);
  const auto* x = static_cast<const Element*>(p.x) + pair / p.top_k * p.hidden_size;
  const int64_t gate_row = expert * w.rows + row;
  const float gate = low_bit_row(w, row, x) + element_at<Element>(p.gate_up_bias, gate_row);
  const float factor =
      low_bit_row(w, p.inner_size + row, x) + element_at<Element>(p.gate_up_bias, p.inner_size + gate_row);
  if (threadIdx.x % 32 == 0) inner[place] = Element(gate_product(p, gate, factor));
}

// Warp w: feature w % H of token w / H.
template <typename Element>
__global__ void __launch_bounds__(kRowThreads)
    low_bit_down_kernel(const __grid_constant__ LowBitExpertsParams p, const Element* inner) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t place = (int64_t{blockIdx.x} * kRowThreads + threadIdx.x) / 32;
  if (place >= p.num_tokens * p.hidden_size) return;
  const int64_t row = place % p.hidden_size, first = place / p.hidden_size * p.top_k;
  float y = 0;
  for (int64_t pair = first; pair < first + p.top_k; ++pair) {
    const int32_t expert = p.experts[pair];
    if (!exists(p, expert)) continue;
    const float sum = low_bit_row(p.down.of(expert), row, inner + pair * p.inner_size);
    y += p.weights[pair] * (sum + element_at<Element>(p.down_bias, expert * p.hidden_size + row));
  }
  if (threadIdx.x % 32 == 0)
    static_cast<Element*>(p.y)[place] = Element(element_at<Element>(p.residual, place) + y);
}

template <typename Element>
cudaError_t launch_low_bit_rows(const LowBitExpertsParams& p, void* scratch, const Launch& launch) {
  auto* inner = static_cast<Element*>(scratch);
  const auto blocks = [](int64_t warps) {
    return dim3(static_cast<unsigned>(divide_up(warps * 32, kRowThreads)));
  };
  const int64_t features = p.num_tokens * p.top_k * p.inner_size;
  if (features > 0) {
    const cudaError_t error = launch_overlapped(low_bit_gate_up_kernel<Element>, blocks(features),
                                                dim3(kRowThreads), 0, launch, p, inner);
    if (error != cudaSuccess) return error;
  }
  return launch_overlapped(low_bit_down_kernel<Element>, blocks(p.num_tokens * p.hidden_size),
                           dim3(kRowThreads), 0, launch, p, static_cast<const Element*>(inner));
}

}  // namespace ortolan::cuda
