// Host side of SnapKvScore on sm_90a.
#pragma once

#include <algorithm>

#include "instances.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/common/tensor_maps.h"
#include "sm90.cuh"

namespace ortolan::cuda {

template <int kHeadSize>
ScorePlan plan_score_sm90(const SnapKvScoreParams& p, void* workspace) {
  using Shape = ScoreSm90Shape<kHeadSize>;
  constexpr int64_t kBlocks = 128;  // where the heads of one sequence allow: a wave of large GPUs
  const int64_t pairs = p.num_sequences * p.cache.num_kv_heads;
  ScorePlan plan{};
  plan.group = static_cast<int>(p.num_heads / p.cache.num_kv_heads);
  plan.query_rows = Shape::kQueries;
  plan.rows = plan.group * plan.query_rows;
  plan.span_keys = Shape::kKeys;
  plan.spans =
      static_cast<int>(std::clamp<int64_t>(kBlocks / pairs, 1, divide_up(p.cache.capacity, Shape::kKeys)));
  plan.place(workspace, pairs);
  return plan;
}

template <typename Element, int kHeadSize>
size_t score_sm90_workspace_bytes(const SnapKvScoreParams& p) {
  return plan_score_sm90<kHeadSize>(p, nullptr).workspace_bytes(p.num_sequences * p.cache.num_kv_heads);
}

template <typename Element, int kHeadSize>
cudaError_t launch_score_sm90(const SnapKvScoreParams& p, const Launch& launch) {
  using Shape = ScoreSm90Shape<kHeadSize>;
  const ScorePlan plan = plan_score_sm90<kHeadSize>(p, launch.workspace);
  ScoreSm90Map map;
  map.box_rows = copied_rows(p.cache, false, Shape::kKeys);
  cudaError_t error = make_cache_map(map.keys, p.element, p.key_cache, p.cache, map.box_rows);
  if (error != cudaSuccess) return error;

  const dim3 grid(plan.spans, static_cast<unsigned>(p.num_sequences * p.cache.num_kv_heads));
  const int shared_bytes = Shape::shared_bytes(plan.group);
  const auto enqueue = [&]<auto kKernel>() {
    const cudaError_t error = allow_shared_memory<kKernel>(launch.device);
    if (error != cudaSuccess) return error;
    return launch_overlapped(kKernel, grid, dim3(Shape::kThreads), shared_bytes, launch, p, plan, map);
  };
  error = plan.group <= 2   ? enqueue.template operator()<score_states_sm90_kernel<Element, kHeadSize, 1>>()
          : plan.group <= 4 ? enqueue.template operator()<score_states_sm90_kernel<Element, kHeadSize, 2>>()
                            : enqueue.template operator()<score_states_sm90_kernel<Element, kHeadSize, 4>>();
  if (error == cudaSuccess) error = launch_score_fold(p, plan, launch);
  if (error != cudaSuccess) return error;
  if (p.query_reduce == QueryReduce::kMax)
    return enqueue.template operator()<score_sums_sm90_kernel<Element, kHeadSize, QueryReduce::kMax>>();
  return enqueue.template operator()<score_sums_sm90_kernel<Element, kHeadSize, QueryReduce::kMean>>();
}

#define ORTOLAN_INSTANTIATE_SCORE_SM90(Element, kHeadSize)                                             \
  template cudaError_t launch_score_sm90<Element, kHeadSize>(const SnapKvScoreParams&, const Launch&); \
  template size_t score_sm90_workspace_bytes<Element, kHeadSize>(const SnapKvScoreParams&);

}  // namespace ortolan::cuda
