// What SnapKvScore's kernels share: sizes, one (sequence, kv head), and a key's score.
#pragma once

#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/softmax.cuh"
#include "kernels/cuda/common/warp.cuh"

namespace ortolan::cuda {

// The state over the four threads that share a row, in each of them; for whole warps.
__device__ __forceinline__ SoftmaxState merged_quad(SoftmaxState state) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
    state =
        Merge::of(state, {__shfl_xor_sync(~0u, state.maximum, step), __shfl_xor_sync(~0u, state.total, step)})
            .state;
  return state;
}

// Sizes that follow from shapes, and where states lie. A row is one query of one head of the group: row
// `head * query_rows + query`.
struct ScorePlan {
  int group;               // query heads per kv head
  int query_rows;          // per head: Wq, rounded up to what a kernel takes at a time
  int rows;                // group * query_rows
  int spans;               // parts of the capacity whose states are partial
  int span_keys;           // adjacent keys of a span
  SoftmaxState* partials;  // [B * Hkv, spans, rows]
  SoftmaxState* states;    // [B * Hkv, rows]: maximum, and 1 / sum (0 where there is no query)

  size_t workspace_bytes(int64_t pairs) const {
    return pairs * rows * (spans + size_t{1}) * sizeof(SoftmaxState);
  }
  void place(void* workspace, int64_t pairs) {
    states = static_cast<SoftmaxState*>(workspace);
    partials = states + pairs * rows;
  }
};

// One sequence and kv head.
struct ScorePair {
  int sequence;
  int kv_head;
  int32_t length;   // keys
  int32_t queries;  // n
  int32_t first;    // position of the first query; keys before it are scored

  static __device__ __forceinline__ ScorePair of(const SnapKvScoreParams& p, int index) {
    ScorePair pair;
    const int kv_heads = static_cast<int>(p.cache.num_kv_heads);
    pair.sequence = index / kv_heads;
    pair.kv_head = index % kv_heads;
    const auto capacity = static_cast<int32_t>(p.cache.capacity);
    const auto length = static_cast<int32_t>(p.kv_len.at(pair.sequence, pair.kv_head));
    pair.length = length < 0 ? 0 : length < capacity ? length : capacity;
    pair.queries = min(static_cast<int32_t>(p.window_rows), pair.length);
    pair.first = pair.length - pair.queries;
    return pair;
  }

  // Element offset of the captured query `query` of a head of the group.
  __device__ __forceinline__ int64_t query_offset(const SnapKvScoreParams& p, const ScorePlan& plan, int head,
                                                  int query) const {
    const int64_t row = (first + query) % static_cast<int32_t>(p.window_rows);
    const int64_t query_head = kv_head * plan.group + head;
    return ((sequence * p.window_rows + row) * p.num_heads + query_head) * p.cache.head_size;
  }
};

// What the queries of a head give one key: the sum of their probabilities, or the largest. Begins with 0.
template <QueryReduce kReduce>
struct QueryWeights {
  // With one more query's probability, exponential * inverse.
  static __device__ __forceinline__ float joined(float known, float exponential, float inverse) {
    if constexpr (kReduce == QueryReduce::kMax) return fmaxf(known, exponential * inverse);
    return fmaf(exponential, inverse, known);
  }
  // Of the four threads that share a key, in each of them.
  static __device__ __forceinline__ float of_quad(float own) {
    if constexpr (kReduce == QueryReduce::kMax) return quad_max(own);
    return quad_sum(own);
  }
};

// What the queries of all heads give one key, made a score: a mean over queries, or their largest, reduced
// over the heads of the group.
template <QueryReduce kReduce>
struct GroupWeights {
  GroupReduce reduce;
  float value = 0;

  __device__ __forceinline__ void add(float head) {
    value = reduce == GroupReduce::kMax ? fmaxf(value, head) : value + head;
  }
  __device__ __forceinline__ float score(const ScorePlan& plan, const ScorePair& pair) const {
    const float heads = reduce == GroupReduce::kMean ? static_cast<float>(plan.group) : 1.0f;
    const int32_t queries = kReduce == QueryReduce::kMax ? 1 : max(pair.queries, 1);
    return value / (heads * static_cast<float>(queries));
  }
};

}  // namespace ortolan::cuda
