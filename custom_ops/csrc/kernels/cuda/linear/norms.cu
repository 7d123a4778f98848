// RMS norms of rows, with residual and scale.
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kManyRows = 4096;  // from here on blocks take several rows each

__device__ __forceinline__ float norm_factor(const RmsNormAddParams& p, float squares) {
  return rsqrtf(squares / static_cast<float>(p.row_size) + p.epsilon);
}

template <typename Element>
__device__ __forceinline__ float norm_scale(const RmsNormAddParams& p) {
  return p.scale ? to_float(*static_cast<const Element*>(p.scale)) : 1.0f;
}

// A row per block: y = (residual + x * rsqrt(mean(x^2) + epsilon) * norm_weight) * scale. Each thread reads
// an element before it writes it, so y may be x or the residual.
template <typename Element>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(const __grid_constant__ RmsNormAddParams p) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t row = int64_t{blockIdx.x} * p.row_size;
  const auto* input = static_cast<const Element*>(p.x) + row;
  float squares[1] = {};
  for (int64_t i = threadIdx.x; i < p.row_size; i += kThreads) {
    const float x = to_float(input[i]);
    squares[0] = fmaf(x, x, squares[0]);
  }
  block_sums<kThreads>(squares);
  const float factor = norm_factor(p, squares[0]);
  const auto* weight = static_cast<const Element*>(p.norm_weight);
  const auto* residual = static_cast<const Element*>(p.residual);
  auto* output = static_cast<Element*>(p.y);
  const float scale = norm_scale<Element>(p);
  for (int64_t i = threadIdx.x; i < p.row_size; i += kThreads) {
    float y = to_float(input[i]) * factor * to_float(weight[i]);
    if (residual) y += to_float(residual[row + i]);
    output[row + i] = Element(y * scale);
  }
}

// The same for rows of at most kPieces * kThreads pieces of 16 bytes, kRows of them per block, which wait in
// registers for their factors: the more rows, the more of memory is under way. Weights are read before the
// kernel in front has ended.
template <typename Element, int kPieces, int kRows>
__global__ void __launch_bounds__(kThreads)
    rms_norm_pieces_kernel(const __grid_constant__ RmsNormAddParams p) {
  constexpr int kSize = kPieceSize<Element>;
  const int pieces = static_cast<int>(p.row_size) / kSize;
  const int64_t first = int64_t{blockIdx.x} * kRows;
  const auto* weight = static_cast<const uint4*>(p.norm_weight);
  const auto* input = static_cast<const uint4*>(p.x) + first * pieces;
  const auto* residual = static_cast<const uint4*>(p.residual);
  if (residual) residual += first * pieces;
  auto* output = static_cast<uint4*>(p.y) + first * pieces;
  const int rows = static_cast<int>(min(int64_t{kRows}, p.num_tokens - first));
  uint4 w[kPieces], x[kRows][kPieces], added[kRows][kPieces];
  const auto each_piece = [&](auto visit) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n)
      if (const int i = static_cast<int>(threadIdx.x) + n * kThreads; i < pieces) visit(n, i);
  };
  const auto each_row = [&](auto visit) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (r < rows) each_piece([&](int n, int i) { visit(r, n, i); });
  };
  each_piece([&](int n, int i) { w[n] = weight[i]; });
  const float scale = norm_scale<Element>(p);
  launch_dependents();
  wait_for_previous_kernel();
  each_row([&](int r, int n, int i) { x[r][n] = input[r * pieces + i]; });
  if (residual) each_row([&](int r, int n, int i) { added[r][n] = residual[r * pieces + i]; });
  float squares[kRows] = {};
  each_row([&](int r, int n, int) { squares[r] = add_products(x[r][n], x[r][n], squares[r], Element{}); });
  block_sums<kThreads>(squares);
  each_row([&](int r, int n, int i) {
    const float factor = norm_factor(p, squares[r]);
    Element values[kSize], weights[kSize], residuals[kSize];
    __builtin_memcpy(values, &x[r][n], 16);
    __builtin_memcpy(weights, &w[n], 16);
    if (residual) __builtin_memcpy(residuals, &added[r][n], 16);
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      float y = to_float(values[e]) * factor * to_float(weights[e]);
      if (residual) y += to_float(residuals[e]);
      values[e] = Element(y * scale);
    }
    uint4 rounded;
    __builtin_memcpy(&rounded, values, 16);
    output[r * pieces + i] = rounded;
  });
}

template <typename Element, int kPieces, int kRows>
cudaError_t launch_rows(const RmsNormAddParams& p, const Launch& launch) {
  const int64_t blocks = (p.num_tokens + kRows - 1) / kRows;
  return launch_overlapped(rms_norm_pieces_kernel<Element, kPieces, kRows>,
                           dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, launch, p);
}

template <typename Element>
cudaError_t launch_rms_norm(const RmsNormAddParams& p, const Launch& launch) {
  const int64_t pieces = p.row_size / kPieceSize<Element>;
  const auto row_bytes = static_cast<int64_t>(p.row_size * sizeof(Element));
  if (!has_whole_pieces(row_bytes, {p.x, p.norm_weight, p.residual, p.y}) || pieces > 4 * kThreads)
    return launch_overlapped(rms_norm_kernel<Element>, dim3(static_cast<unsigned>(p.num_tokens)),
                             dim3(kThreads), 0, launch, p);
  const bool many = p.num_tokens >= kManyRows;
  if (pieces <= kThreads)
    return many ? launch_rows<Element, 1, 4>(p, launch) : launch_rows<Element, 1, 1>(p, launch);
  if (pieces <= 2 * kThreads)
    return many ? launch_rows<Element, 2, 2>(p, launch) : launch_rows<Element, 2, 1>(p, launch);
  return launch_rows<Element, 4, 1>(p, launch);
}

}  // namespace

cudaError_t rms_norm_add(const RmsNormAddParams& params, const Launch& launch) {
  if (params.num_tokens == 0) return cudaSuccess;
  return with_element(params.element,
                      [&]<typename Element>() { return launch_rms_norm<Element>(params, launch); });
}

}  // namespace ortolan::cuda
