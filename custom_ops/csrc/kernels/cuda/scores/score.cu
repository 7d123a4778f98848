// SnapKvScore: the choice of kernels, and the merge between the two passes.
#include "instances.h"
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/low_bit_cache/caches.h"
#include "kernels/cuda/operators.generated.h"
#include "plan.cuh"
#include "sm90.cuh"

namespace ortolan::cuda {
namespace {

constexpr int kFoldThreads = 128;

// A thread per row merges the spans in ascending order. Grid: (rows / 128, sequences * kv heads).
__global__ void __launch_bounds__(kFoldThreads)
    score_fold_kernel(const __grid_constant__ SnapKvScoreParams p, const __grid_constant__ ScorePlan plan) {
  wait_for_previous_kernel();
  const int row = blockIdx.x * kFoldThreads + threadIdx.x;
  if (row >= plan.rows) return;
  const ScorePair pair = ScorePair::of(p, blockIdx.y);
  const int spans = min((pair.length + plan.span_keys - 1) / plan.span_keys, plan.spans);
  const SoftmaxState* partial = plan.partials + int64_t{blockIdx.y} * plan.spans * plan.rows + row;
  SoftmaxState state = kNoKeys;
#pragma unroll 8
  for (int span = 0; span < spans; ++span) state = Merge::of(state, partial[int64_t{span} * plan.rows]).state;
  const bool exists = row % plan.query_rows < pair.queries;
  plan.states[int64_t{blockIdx.y} * plan.rows + row] =
      exists ? SoftmaxState{state.maximum, 1.0f / state.total} : SoftmaxState{0.0f, 0.0f};
}

// Calls f.operator()<Element, kHeadSize>() for the smallest instance that holds the head.
template <typename Element, typename Function>
auto with_head_size(int64_t head_size, Function&& f) {
  if (head_size <= 64) return f.template operator()<Element, 64>();
  if (head_size <= 128) return f.template operator()<Element, 128>();
  if (head_size <= 256) return f.template operator()<Element, 256>();
  return f.template operator()<Element, 512>();
}

template <typename Function>
auto with_instance(const SnapKvScoreParams& p, Function&& f) {
  return with_element(p.element,
                      [&]<typename Element>() { return with_head_size<Element>(p.cache.head_size, f); });
}

bool sm90_takes(const SnapKvScoreParams& p, const Device& device) {
  using Shape = ScoreSm90Shape<64>;  // limits are those of all
  const int64_t group = p.num_heads / p.cache.num_kv_heads, head_size = p.cache.head_size;
  return device.compute_capability == 90 && p.element != ElementType::kFloat32 &&
         (head_size == 64 || head_size == 128) && group >= 2 && group <= Shape::kMostHeads &&
         p.window_rows > 0 && p.window_rows <= Shape::kQueries;
}

// Calls f.operator()<Element, kHeadSize>() for an instance of the sm_90a kernels.
template <typename Function>
auto with_sm90_instance(const SnapKvScoreParams& p, Function&& f) {
  return with_half_element(p.element, [&]<typename Element>() {
    return p.cache.head_size == 64 ? f.template operator()<Element, 64>()
                                   : f.template operator()<Element, 128>();
  });
}

}  // namespace

cudaError_t launch_score_fold(const SnapKvScoreParams& p, const ScorePlan& plan, const Launch& launch) {
  const dim3 grid((plan.rows + kFoldThreads - 1) / kFoldThreads,
                  static_cast<unsigned>(p.num_sequences * p.cache.num_kv_heads));
  return launch_overlapped(score_fold_kernel, grid, dim3(kFoldThreads), 0, launch, p, plan);
}

namespace {

size_t dense_workspace(const SnapKvScoreParams& params, const Device& device) {
  if (sm90_takes(params, device))
    return with_sm90_instance(params, [&]<typename Element, int kHeadSize>() {
      return score_sm90_workspace_bytes<Element, kHeadSize>(params);
    });
  return with_instance(params, [&]<typename Element, int kHeadSize>() {
    return score_workspace_bytes<Element, kHeadSize>(params);
  });
}

cudaError_t score_dense(const SnapKvScoreParams& params, const Launch& launch) {
  if (sm90_takes(params, launch.device))
    return with_sm90_instance(params, [&]<typename Element, int kHeadSize>() {
      return launch_score_sm90<Element, kHeadSize>(params, launch);
    });
  return with_instance(params, [&]<typename Element, int kHeadSize>() {
    return launch_score<Element, kHeadSize>(params, launch);
  });
}

}  // namespace

size_t snap_kv_score_workspace(const SnapKvScoreParams& params, const Device& device) {
  return expanded_bytes(params) + dense_workspace(params, device);
}

cudaError_t snap_kv_score(const SnapKvScoreParams& params, const Launch& launch) {
  if (params.num_sequences == 0 || params.cache.capacity == 0) return cudaSuccess;
  if (vector_bytes(16, {params.capture, params.key_cache}) < 16) return cudaErrorMisalignedAddress;
  if (!is_code(params.cache_element)) return score_dense(params, launch);
  SnapKvScoreParams dense = params;
  Launch rest = launch;
  const cudaError_t error = expand_caches(dense, rest);
  return error == cudaSuccess ? score_dense(dense, rest) : error;
}

}  // namespace ortolan::cuda
