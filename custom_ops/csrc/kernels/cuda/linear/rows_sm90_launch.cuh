// Host side of rows_sm90.cuh: tensor maps from shapes and pointers, one launch.
#pragma once

#include <algorithm>

#include "gemv_sm90.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/common/tensor_maps.h"
#include "rows_sm90.cuh"

namespace ortolan::cuda {

// What is multiplied: inputs [T, K], normalised already, and weights [N or 2N, K], elements or codes.
struct RowOperands {
  ElementType type;
  const void* input;
  const void* weight;
  int slice_steps = 0;
  const float* input_scales = nullptr;  // of codes, as in RowsSm90Params
  const float* weight_scales = nullptr;
  int scale_groups = 0;
};

template <bool kGated>
cudaError_t make_row_maps(RowsSm90Params& params, const FusedLinearParams& p, const RowOperands& operands) {
  using Shape = RowsSm90Shape;
  const int64_t inner = Shape::kStepBytes / element_bytes(operands.type);
  cudaError_t error = make_tensor_map(params.input, operands.type, operands.input,
                                      {p.num_inputs, p.num_tokens, 1}, {inner, Shape::kRows, 1});
  if (error == cudaSuccess)
    error = make_tensor_map(params.weight, operands.type, operands.weight,
                            {p.num_inputs, p.num_outputs, kGated ? 2 : 1}, {inner, Shape::kColumns, 1});
  params.stores_boxes = kGated || (!p.output_float32 && has_whole_pieces(p.num_outputs * 2, {p.output}));
  if (params.stores_boxes && error == cudaSuccess)
    error =
        make_tensor_map(params.output, p.element, p.output, {p.num_outputs, p.num_tokens, 1}, {64, 64, 1});
  return error;
}

template <typename Computing>
cudaError_t launch_row_tiles(const FusedLinearParams& p, const RowOperands& operands, const Launch& launch) {
  using Shape = RowsSm90Shape;
  using Block = typename Computing::Block;
  RowsSm90Params params;
  cudaError_t error = make_row_maps<Computing::kGated>(params, p, operands);
  if (error != cudaSuccess) return error;
  params.tiles.rows = static_cast<int>(divide_up(p.num_tokens, Shape::kRows * Shape::kCluster));
  params.tiles.columns = static_cast<int>(divide_up(p.num_outputs, Block::kOutputs));
  params.last_row = static_cast<int>(std::max<int64_t>(p.num_tokens - Shape::kRows, 0));
  params.steps = static_cast<int>(divide_up(p.num_inputs, Block::kInner));
  params.slice_steps = operands.slice_steps;
  params.linear = p;
  params.input_scales = operands.input_scales;
  params.weight_scales = operands.weight_scales;
  params.scale_groups = operands.scale_groups;

  constexpr auto kKernel = rows_sm90_kernel<Computing>;
  error = allow_shared_memory<kKernel>(launch.device);
  if (error != cudaSuccess) return error;
  const dim3 block(Shape::kThreads);
  const int resident = resident_clusters<kKernel>(block, Shape::kCluster, Shape::kSharedBytes, launch.device);
  const int clusters = std::min(params.tiles.count(), std::max(resident, 1));
  return launch_clusters(kKernel, dim3(static_cast<unsigned>(clusters * Shape::kCluster)), block,
                         Shape::kCluster, Shape::kSharedBytes, launch, params);
}

// The product of rows that are normalised already. kSliced: with the sums of few_sm90.cuh's chains.
template <typename Element, bool kGated, bool kSliced>
cudaError_t launch_rows_sm90(const FusedLinearParams& p, const Launch& launch) {
  const int slice_bytes = RowSlices::of(p.num_inputs * 2).bytes;
  return launch_row_tiles<RowsSm90Group<Element, kGated, kSliced>>(
      p, {p.element, p.input, p.weight, slice_bytes / RowsSm90Shape::kStepBytes}, launch);
}

}  // namespace ortolan::cuda
