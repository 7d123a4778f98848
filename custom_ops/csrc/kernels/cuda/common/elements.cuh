// Conversions of the three element types to and from float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx.cuh"
#include "warp.cuh"

namespace ortolan::cuda {

// Elements of a 16-byte piece.
template <typename Element>
constexpr int kPieceSize = 16 / static_cast<int>(sizeof(Element));

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Adds the products of two 16-byte pieces to a sum, in their order.
__device__ __forceinline__ float add_products(const uint4& a, const uint4& b, float sum, float) {
  const float* x = reinterpret_cast<const float*>(&a);
  const float* y = reinterpret_cast<const float*>(&b);
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = fmaf(x[i], y[i], sum);
  return sum;
}
template <typename Element>
__device__ __forceinline__ float add_products(const uint4& a, const uint4& b, float sum, Element) {
  const uint32_t x[] = {a.x, a.y, a.z, a.w}, y[] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 p = Half<Element>::unpack(x[i]), q = Half<Element>::unpack(y[i]);
    sum = fmaf(p.y, q.y, fmaf(p.x, q.x, sum));
  }
  return sum;
}

// x * factor * weight, element by element, rounded once.
__device__ __forceinline__ uint4 scale_piece(const uint4& x, float factor, const uint4& weight, float) {
  const float* a = reinterpret_cast<const float*>(&x);
  const float* b = reinterpret_cast<const float*>(&weight);
  return make_uint4(__float_as_uint(a[0] * factor * b[0]), __float_as_uint(a[1] * factor * b[1]),
                    __float_as_uint(a[2] * factor * b[2]), __float_as_uint(a[3] * factor * b[3]));
}
template <typename Element>
__device__ __forceinline__ uint4 scale_piece(const uint4& x, float factor, const uint4& weight, Element) {
  const uint32_t a[] = {x.x, x.y, x.z, x.w}, b[] = {weight.x, weight.y, weight.z, weight.w};
  uint32_t y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 p = Half<Element>::unpack(a[i]), q = Half<Element>::unpack(b[i]);
    y[i] = Half<Element>::pack(p.x * factor * q.x, p.y * factor * q.y);
  }
  return make_uint4(y[0], y[1], y[2], y[3]);
}

// Adds each of some values over the block; for the whole block, once.
template <int kThreads, int kValues>
__device__ __forceinline__ void block_sums(float (&values)[kValues]) {
  __shared__ float sums[kValues][kThreads / 32];
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    values[v] = warp_sum(values[v]);
    if (threadIdx.x % 32 == 0) sums[v][threadIdx.x / 32] = values[v];
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    values[v] = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) values[v] += sums[v][w];
  }
}

}  // namespace ortolan::cuda
