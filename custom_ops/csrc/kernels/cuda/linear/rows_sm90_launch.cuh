// Host side of rows_sm90.cuh: tensor maps from shapes and pointers, one launch.
#pragma once

#include <algorithm>

#include "gemv_sm90.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/common/tensor_maps.h"
#include "rows_sm90.cuh"

namespace ortolan::cuda {

template <bool kGated>
cudaError_t make_row_maps(RowsSm90Params& params, const FusedLinearParams& p) {
  using Shape = RowsSm90Shape;
  cudaError_t error = make_tensor_map(params.input, p.element, p.input, {p.num_inputs, p.num_tokens, 1},
                                      {Shape::kInner, Shape::kRows, 1});
  if (error == cudaSuccess)
    error = make_tensor_map(params.weight, p.element, p.weight, {p.num_inputs, p.num_outputs, kGated ? 2 : 1},
                            {Shape::kInner, Shape::kColumns, 1});
  if (kGated && error == cudaSuccess)
    error =
        make_tensor_map(params.output, p.element, p.output, {p.num_outputs, p.num_tokens, 1}, {64, 64, 1});
  return error;
}

// The product of rows that are normalised already. kSliced: with the sums of few_sm90.cuh's chains.
template <typename Element, bool kGated, bool kSliced>
cudaError_t launch_rows_sm90(const FusedLinearParams& p, const Launch& launch) {
  using Shape = RowsSm90Shape;
  RowsSm90Params params;
  cudaError_t error = make_row_maps<kGated>(params, p);
  if (error != cudaSuccess) return error;
  params.tiles.rows = static_cast<int>(divide_up(p.num_tokens, Shape::kRows * Shape::kCluster));
  params.tiles.columns = static_cast<int>(divide_up(p.num_outputs, RowsSm90Block<kGated>::kOutputs));
  params.last_row = static_cast<int>(std::max<int64_t>(p.num_tokens - Shape::kRows, 0));
  params.steps = static_cast<int>(divide_up(p.num_inputs, Shape::kInner));
  params.slice_steps = RowSlices::of(p.num_inputs * 2).bytes / (2 * Shape::kInner);
  params.linear = p;

  constexpr auto kKernel = rows_sm90_kernel<Element, kGated, kSliced>;
  error = allow_shared_memory<kKernel>(launch.device);
  if (error != cudaSuccess) return error;
  const dim3 block(Shape::kThreads);
  const int resident = resident_clusters<kKernel>(block, Shape::kCluster, Shape::kSharedBytes, launch.device);
  const int clusters = std::min(params.tiles.count(), std::max(resident, 1));
  return launch_clusters(kKernel, dim3(static_cast<unsigned>(clusters * Shape::kCluster)), block,
                         Shape::kCluster, Shape::kSharedBytes, launch, params);
}

}  // namespace ortolan::cuda
