// Host side of SnapKvScore: sizes from shapes, three launches.
#pragma once

#include <algorithm>

#include "float32.cuh"
#include "instances.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "mma.cuh"

namespace ortolan::cuda {

// The kernels of an element type, and how they cut their work.
template <typename Element, int kHeadSize>
struct ScoreKernels {
  using Tile = ScoreMmaTile<kHeadSize>;
  static constexpr auto kStates = score_states_mma_kernel<Element, kHeadSize>;
  template <QueryReduce kReduce>
  static constexpr auto kSums = score_sums_mma_kernel<Element, kHeadSize, kReduce>;
  static constexpr int kQueries = Tile::kStep;      // that a head's queries are rounded up to
  static constexpr int kSumKeys = Tile::kHeldRows;  // of a block of the second pass
  static constexpr int kTileKeys = Tile::kRows;
  static constexpr int kSharedBytes = Tile::kSharedBytes;
  static constexpr bool kInterleaved = true;  // spans take tiles by turns

  // Parts that the first pass cuts its queries into.
  static int shares(const ScorePlan& plan, const Device&) {
    return static_cast<int>(divide_up(plan.rows, Tile::kHeldRows));
  }
  static int states_bytes(const ScorePlan&, int) { return kSharedBytes; }
};

template <int kHeadSize>
struct ScoreKernels<float, kHeadSize> {
  using Tile = ScoreFloatTile<kHeadSize>;
  static constexpr auto kStates = score_states_float_kernel<kHeadSize>;
  template <QueryReduce kReduce>
  static constexpr auto kSums = score_sums_float_kernel<kHeadSize, kReduce>;
  static constexpr int kQueries = Tile::kQueries;
  static constexpr int kSumKeys = Tile::kKeys;
  static constexpr int kTileKeys = Tile::kKeys;
  static constexpr int kSharedBytes = Tile::kSharedBytes;
  static constexpr bool kInterleaved = false;

  static int shares(const ScorePlan& plan, const Device& device) {
    return Tile::shares(plan, device.shared_bytes_per_block);
  }
  static int states_bytes(const ScorePlan& plan, int shares) {
    return kSharedBytes + Tile::rows(plan, shares) * Tile::kStateBytes;
  }
};

template <typename Element, int kHeadSize>
ScorePlan plan_score(const SnapKvScoreParams& p, void* workspace) {
  using Kernels = ScoreKernels<Element, kHeadSize>;
  constexpr int kMostSpans = 128;
  constexpr int kBlocks =
      256;  // of the first pass, where the heads of one sequence allow: a wave of large GPUs
  ScorePlan plan{};
  plan.group = static_cast<int>(p.num_heads / p.cache.num_kv_heads);
  plan.query_rows = static_cast<int>(divide_up(p.window_rows, Kernels::kQueries)) * Kernels::kQueries;
  plan.rows = plan.group * plan.query_rows;
  const auto tiles = static_cast<int>(divide_up(p.cache.capacity, Kernels::kTileKeys));
  if constexpr (Kernels::kInterleaved) {
    const int64_t others = p.cache.num_kv_heads * std::max(Kernels::shares(plan, {}), 1);
    const auto wanted = static_cast<int>(std::clamp<int64_t>(kBlocks / others, 1, kMostSpans));
    plan.spans = std::min(wanted, tiles);
    plan.span_keys = Kernels::kTileKeys;
  } else {
    const int tiles_per_span = (tiles + kMostSpans - 1) / kMostSpans;
    plan.spans = (tiles + tiles_per_span - 1) / tiles_per_span;
    plan.span_keys = tiles_per_span * Kernels::kTileKeys;
  }
  plan.place(workspace, p.num_sequences * p.cache.num_kv_heads);
  return plan;
}

template <typename Element, int kHeadSize>
size_t score_workspace_bytes(const SnapKvScoreParams& p) {
  return plan_score<Element, kHeadSize>(p, nullptr).workspace_bytes(p.num_sequences * p.cache.num_kv_heads);
}

template <typename Element, int kHeadSize>
cudaError_t launch_score(const SnapKvScoreParams& p, const Launch& launch) {
  using Kernels = ScoreKernels<Element, kHeadSize>;
  const dim3 threads(Kernels::Tile::kThreads);
  const ScorePlan plan = plan_score<Element, kHeadSize>(p, launch.workspace);
  const auto pairs = static_cast<unsigned>(p.num_sequences * p.cache.num_kv_heads);
  if (plan.rows == 0)  // nothing was captured
    return cudaMemsetAsync(p.score, 0, pairs * p.cache.capacity * sizeof(float), launch.stream);
  const int shares = Kernels::shares(plan, launch.device);
  const int states_bytes = Kernels::states_bytes(plan, shares);
  cudaError_t error = allow_shared_memory<Kernels::kStates>(launch.device);
  if (error == cudaSuccess) {
    const dim3 grid(plan.spans, pairs, shares);
    error = launch_overlapped(Kernels::kStates, grid, threads, states_bytes, launch, p, plan);
  }
  if (error == cudaSuccess) error = launch_score_fold(p, plan, launch);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(divide_up(p.cache.capacity, Kernels::kSumKeys)), pairs);
  const auto enqueue = [&]<auto kKernel>() {
    const cudaError_t error = allow_shared_memory<kKernel>(launch.device);
    if (error != cudaSuccess) return error;
    return launch_overlapped(kKernel, grid, threads, Kernels::kSharedBytes, launch, p, plan);
  };
  if (p.query_reduce == QueryReduce::kMax)
    return enqueue.template operator()<Kernels::template kSums<QueryReduce::kMax>>();
  return enqueue.template operator()<Kernels::template kSums<QueryReduce::kMean>>();
}

// One source file per element type keeps a build parallel.
#define ORTOLAN_INSTANTIATE_SCORE(Element, kHeadSize)                                             \
  template cudaError_t launch_score<Element, kHeadSize>(const SnapKvScoreParams&, const Launch&); \
  template size_t score_workspace_bytes<Element, kHeadSize>(const SnapKvScoreParams&);

}  // namespace ortolan::cuda
