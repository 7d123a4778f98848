// Host side of the sm_90a kernel of gated linear layers: tensor maps from shapes and pointers, one launch.
#pragma once

#include <algorithm>

#include "gated_sm90.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/common/tensor_maps.h"

namespace ortolan::cuda {

inline cudaError_t make_gated_maps(GatedSm90Params& params, const FusedLinearParams& p) {
  using Shape = GatedSm90Shape;
  cudaError_t error = make_tensor_map(params.input, p.element, p.input, {p.num_inputs, p.num_tokens, 1},
                                      {Shape::kInner, Shape::kRows, 1});
  if (error == cudaSuccess)
    error = make_tensor_map(params.weight, p.element, p.weight, {p.num_inputs, p.num_outputs, 2},
                            {Shape::kInner, Shape::kColumns, 1});
  if (error == cudaSuccess)
    error =
        make_tensor_map(params.output, p.element, p.output, {p.num_outputs, p.num_tokens, 1}, {64, 64, 1});
  return error;
}

// The gated product of rows that are normalised already.
template <typename Element>
cudaError_t launch_gated_sm90(const FusedLinearParams& p, const Launch& launch) {
  using Shape = GatedSm90Shape;
  GatedSm90Params params;
  cudaError_t error = make_gated_maps(params, p);
  if (error != cudaSuccess) return error;
  params.tiles.rows = static_cast<int>(divide_up(p.num_tokens, Shape::kRows * Shape::kCluster));
  params.tiles.columns = static_cast<int>(divide_up(p.num_outputs, Shape::kColumns));
  params.last_row = static_cast<int>(std::max<int64_t>(p.num_tokens - Shape::kRows, 0));
  params.steps = static_cast<int>(divide_up(p.num_inputs, Shape::kInner));
  params.activation = p.activation;

  constexpr auto kKernel = gated_sm90_kernel<Element>;
  error = allow_shared_memory<kKernel>(launch.device);
  if (error != cudaSuccess) return error;
  const dim3 block(Shape::kThreads);
  const int resident = resident_clusters<kKernel>(block, Shape::kCluster, Shape::kSharedBytes, launch.device);
  const int clusters = std::min(params.tiles.count(), std::max(resident, 1));
  return launch_clusters(kKernel, dim3(static_cast<unsigned>(clusters * Shape::kCluster)), block,
                         Shape::kCluster, Shape::kSharedBytes, launch, params);
}

}  // namespace ortolan::cuda
