// Host side of sm90.cuh: tensor maps from shapes and pointers, two launches.
#pragma once

#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/common/tensor_maps.h"
#include "sm90.cuh"

namespace ortolan::cuda {

constexpr int64_t kClusterPairs = 64;  // of an expert, on average

template <bool kGated>
cudaError_t make_expert_maps(ExpertSm90Params& params, const void* inputs) {
  using Shape = ExpertSm90Shape;
  const MoeExpertsParams& p = params.layer;
  const int64_t depth = kGated ? p.hidden_size : p.inner_size, rows = kGated ? p.inner_size : p.hidden_size;
  const cudaError_t error =
      make_tensor_map(params.weight, p.element, kGated ? p.gate_up : p.down,
                      {depth, rows, p.num_experts * (kGated ? 2 : 1)}, {Shape::kInner, Shape::kHalf, 1});
  if (error != cudaSuccess) return error;
  return make_tensor_map(params.inputs, p.element, inputs, {depth, p.num_tokens * p.top_k, 1},
                         {Shape::kInner, Shape::kBoxPairs, 1});
}

template <typename Element, bool kGated>
cudaError_t launch_sm90_tiles(const MoeExpertsParams& p, const ExpertScratch& scratch, const Launch& launch) {
  using Shape = ExpertSm90Shape;
  ExpertSm90Params params{.layer = p, .scratch = scratch};
  cudaError_t error = make_expert_maps<kGated>(params, kGated ? scratch.products : scratch.inner);
  constexpr auto kKernel = expert_sm90_kernel<Element, kGated>;
  if (error == cudaSuccess) error = allow_shared_memory<kKernel>(launch.device);
  if (error != cudaSuccess) return error;
  params.steps = static_cast<int>(divide_up(kGated ? p.hidden_size : p.inner_size, Shape::kInner));
  params.row_tiles = static_cast<int>(kGated ? divide_up(p.inner_size, Shape::kHalf)
                                             : divide_up(p.hidden_size, 2 * Shape::kHalf));
  const int64_t pairs = p.num_tokens * p.top_k;
  // Few pairs: two blocks would load the weights of one tile. Their number changes no bits.
  const int cluster = pairs < kClusterPairs * p.num_experts ? 1 : Shape::kMostCluster;
  const int64_t most_pairs = cluster * kMostColumns;  // each expert's last tiles may hold a single one
  const int64_t tiles = std::min(pairs, pairs / most_pairs + p.num_experts) * params.row_tiles;
  const dim3 block(Shape::kThreads);
  const int resident = resident_clusters<kKernel>(block, cluster, Shape::kSharedBytes, launch.device);
  const auto clusters = std::min<int64_t>(tiles, std::max(resident, 1));
  return launch_clusters(kKernel, dim3(static_cast<unsigned>(clusters * cluster)), block, cluster,
                         Shape::kSharedBytes, launch, params);
}

template <typename Element>
cudaError_t launch_sm90_product(const MoeExpertsParams& p, const ExpertScratch& scratch, bool gated,
                                const Launch& launch) {
  return gated ? launch_sm90_tiles<Element, true>(p, scratch, launch)
               : launch_sm90_tiles<Element, false>(p, scratch, launch);
}

}  // namespace ortolan::cuda
