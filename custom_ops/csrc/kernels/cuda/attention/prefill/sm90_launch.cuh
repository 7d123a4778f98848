// Host side of the sm_90a prefill kernel: tensor maps from shapes and pointers, one launch.
#pragma once

#include <algorithm>

#include "kernels/cuda/attention/instances.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/tensor_maps.h"
#include "sm90.cuh"

namespace ortolan::cuda {

// Short chunks' works, and the scratch memory that their sums take.
template <typename Shape>
struct ShortPlan {
  ShortChunks chunks;
  int64_t works;  // at most
  size_t bytes;

  static ShortPlan of(const SwaAttentionParams& params, const Device& device, const OwnTokens& own) {
    constexpr int64_t kMostBytes = int64_t{128} << 20;
    constexpr int kFloats = Shape::kColumns / 2 + 4;  // of a thread
    constexpr int64_t kPlaceBytes = Shape::kGroups * 128 * kFloats * sizeof(float);
    using Spans = KeySpans<Shape::kKeys>;
    ShortPlan plan{};
    ShortChunks& chunks = plan.chunks;
    chunks.group = static_cast<int>(params.num_heads / params.cache.num_kv_heads);
    chunks.group_tokens = 64 / chunks.group;
    chunks.by_group = Divisor::of(chunks.group);
    const auto last = static_cast<int>(std::max<int64_t>(params.cache.capacity - 1, 0));
    const int most_spans = Spans::of(last / Shape::kKeys) + 1;
    const int64_t entries = max_query_tiles(params.packing, Shape::kGroups * chunks.group_tokens, own) *
                            params.cache.num_kv_heads;
    plan.works = entries * most_spans;
    const int64_t blocks = std::min<int64_t>(plan.works, device.num_multiprocessors);
    const int64_t places = std::min(std::max(plan.works, 2 * blocks), kMostBytes / kPlaceBytes);
    chunks.most_places = static_cast<int>(places);
    chunks.most_counts = kCounters - kQueueCounters;
    plan.bytes = places * kPlaceBytes;
    return plan;
  }
  void take(const Launch& launch) {
    chunks.partials = static_cast<float4*>(launch.workspace);
    chunks.counts = launch.counters + kQueueCounters;
  }
};

template <typename Element, typename Shape>
cudaError_t enqueue_sm90_prefill(const SwaAttentionParams& params, const Launch& launch, const OwnTokens& own,
                                 int64_t works, const typename Shape::Chunks& chunks) {
  const CacheLayout& cache = params.cache;
  const auto element = params.element;
  Sm90Maps maps;
  maps.box_rows = copied_rows(cache, params.window >= 0, Shape::kKeys);
  const TensorShape queries{cache.head_size, params.num_heads, params.packing.num_tokens};
  cudaError_t error =
      make_tensor_map(maps.query, element, params.query, queries, {64, chunks.heads(), chunks.tokens()});
  if (error == cudaSuccess)
    error = make_cache_map(maps.keys, element, params.key_cache, cache, maps.box_rows);
  if (error == cudaSuccess)
    error = make_cache_map(maps.values, element, params.value_cache, cache, maps.box_rows);
  if (error != cudaSuccess) return error;

  constexpr auto kKernel = sm90_prefill_kernel<Element, Shape>;
  error = allow_shared_memory<kKernel>(launch.device);
  if (error != cudaSuccess) return error;
  WorkQueue queue;
  queue.section_heads = static_cast<int>(heads_per_section(params));
  queue.own = own;
  queue.is_behind = launch.is_behind;
  queue.taken = launch.counters;
  const auto clusters =
      static_cast<unsigned>(std::min<int64_t>(works, launch.device.num_multiprocessors / Shape::kBlocks));
  return launch_clusters(kKernel, dim3(clusters * Shape::kBlocks), dim3(Shape::kThreads), Shape::kBlocks,
                         Shape::kSharedBytes, launch, params, maps, queue, chunks);
}

template <typename Element, int kHeadSize, int kKeyRows>
cudaError_t launch_sm90_prefill(const SwaAttentionParams& params, const Launch& launch,
                                const OwnTokens& own) {
  using Shape = Sm90Shape<kHeadSize, kKeyRows, false>;
  const int64_t works = max_query_tiles(params.packing, Shape::kRows, own) * params.num_heads;
  return enqueue_sm90_prefill<Element, Shape>(params, launch, own, works, {});
}

template <typename Element, int kHeadSize, int kKeyRows>
cudaError_t launch_sm90_short(const SwaAttentionParams& params, const Launch& launch, const OwnTokens& own) {
  using Shape = Sm90Shape<kHeadSize, kKeyRows, true>;
  auto plan = ShortPlan<Shape>::of(params, launch.device, own);
  plan.take(launch);
  return enqueue_sm90_prefill<Element, Shape>(params, launch, own, plan.works, plan.chunks);
}

template <typename Element, int kHeadSize, int kKeyRows>
size_t sm90_short_workspace_bytes(const SwaAttentionParams& params, const Device& device,
                                  const OwnTokens& own) {
  return ShortPlan<Sm90Shape<kHeadSize, kKeyRows, true>>::of(params, device, own).bytes;
}

// One source file per element type keeps a build parallel.
#define ORTOLAN_INSTANTIATE_SM90_PREFILL(Element, kHeadSize, kKeyRows)                              \
  template cudaError_t launch_sm90_prefill<Element, kHeadSize, kKeyRows>(const SwaAttentionParams&, \
                                                                         const Launch&, const OwnTokens&);
#define ORTOLAN_INSTANTIATE_SM90_SHORT(Element, kHeadSize, kKeyRows)                                     \
  template cudaError_t launch_sm90_short<Element, kHeadSize, kKeyRows>(const SwaAttentionParams&,        \
                                                                       const Launch&, const OwnTokens&); \
  template size_t sm90_short_workspace_bytes<Element, kHeadSize, kKeyRows>(const SwaAttentionParams&,    \
                                                                           const Device&, const OwnTokens&);

}  // namespace ortolan::cuda
