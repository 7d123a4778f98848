// Host side of SnapKvScore: sizes from shapes, three launches.
#pragma once

#include <algorithm>

#include "launch.cuh"
#include "score.cuh"
#include "score_instances.h"

namespace ortolan::cuda {

template <typename Element, int kHeadSize>
ScorePlan plan_score(const SnapKvScoreParams& p, void* workspace) {
  using Tile = ScoreTile<Element, kHeadSize>;
  constexpr int kMostSpans = 128;
  ScorePlan plan{};
  plan.group = static_cast<int>(p.num_heads / p.cache.num_kv_heads);
  plan.query_blocks = static_cast<int>((p.window_rows + Tile::kQueries - 1) / Tile::kQueries);
  plan.rows = plan.group * plan.query_blocks * Tile::kQueries;
  const auto tiles = static_cast<int>((p.cache.capacity + Tile::kKeys - 1) / Tile::kKeys);
  plan.tiles_per_span = (tiles + kMostSpans - 1) / kMostSpans;
  plan.spans = (tiles + plan.tiles_per_span - 1) / plan.tiles_per_span;
  plan.states = static_cast<SoftmaxState*>(workspace);
  plan.partials = plan.states + p.num_sequences * p.cache.num_kv_heads * plan.rows;
  return plan;
}

template <typename Element, int kHeadSize>
size_t score_workspace_bytes(const SnapKvScoreParams& p) {
  const ScorePlan plan = plan_score<Element, kHeadSize>(p, nullptr);
  return p.num_sequences * p.cache.num_kv_heads * plan.rows * (plan.spans + size_t{1}) * sizeof(SoftmaxState);
}

template <typename Element, int kHeadSize>
cudaError_t launch_score(const SnapKvScoreParams& p, const Launch& launch) {
  using Tile = ScoreTile<Element, kHeadSize>;
  const ScorePlan plan = plan_score<Element, kHeadSize>(p, launch.workspace);
  const auto pairs = static_cast<unsigned>(p.num_sequences * p.cache.num_kv_heads);
  if (plan.rows == 0)  // nothing was captured
    return cudaMemsetAsync(p.score, 0, pairs * p.cache.capacity * sizeof(float), launch.stream);
  const auto states_kernel = score_states_kernel<Element, kHeadSize>;
  const auto sums_kernel = score_sums_kernel<Element, kHeadSize>;
  const int states_bytes = Tile::kSharedBytes + plan.rows * static_cast<int>(sizeof(SoftmaxState));
  cudaError_t error =
      cudaFuncSetAttribute(states_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, states_bytes);
  if (error == cudaSuccess)
    error =
        cudaFuncSetAttribute(sums_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (error == cudaSuccess)
    error = launch_overlapped(states_kernel, dim3(plan.spans, pairs), dim3(Tile::kThreads), states_bytes,
                              launch, p, plan);
  if (error == cudaSuccess)
    error = launch_score_fold(p, plan, plan.tiles_per_span * Tile::kKeys, Tile::kQueries, launch);
  if (error != cudaSuccess) return error;
  const auto tiles = static_cast<unsigned>((p.cache.capacity + Tile::kKeys - 1) / Tile::kKeys);
  return launch_overlapped(sums_kernel, dim3(tiles, pairs), dim3(Tile::kThreads), Tile::kSharedBytes, launch,
                           p, plan);
}

// One source file per element type keeps a build parallel.
#define ORTOLAN_INSTANTIATE_SCORE(Element, kHeadSize)                                             \
  template cudaError_t launch_score<Element, kHeadSize>(const SnapKvScoreParams&, const Launch&); \
  template size_t score_workspace_bytes<Element, kHeadSize>(const SnapKvScoreParams&);

}  // namespace ortolan::cuda
