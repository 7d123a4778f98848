// Host side of the sm_90a prefill kernel: tensor maps from shapes and pointers, one launch.
#pragma once

#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/tensor_maps.h"
#include "sm90.cuh"

namespace ortolan::cuda {

template <typename Element, int kHeadSize, int kKeyRows>
cudaError_t launch_sm90_prefill(const SwaAttentionParams& params, const Launch& launch, int most_decode) {
  using Shape = Sm90Shape<kHeadSize, kKeyRows>;
  const CacheLayout& cache = params.cache;
  const auto element = params.element;
  Sm90Maps maps;
  maps.box_rows = copied_rows(cache, params.window >= 0, Shape::kKeys);
  const TensorShape queries{cache.head_size, params.num_heads, params.packing.num_tokens};
  cudaError_t error = make_tensor_map(maps.query, element, params.query, queries, {64, 1, 64});
  if (error == cudaSuccess)
    error = make_cache_map(maps.keys, element, params.key_cache, cache, maps.box_rows);
  if (error == cudaSuccess)
    error = make_cache_map(maps.values, element, params.value_cache, cache, maps.box_rows);
  if (error != cudaSuccess) return error;

  constexpr auto kKernel = sm90_prefill_kernel<Element, kHeadSize, kKeyRows>;
  error = allow_shared_memory<kKernel>(launch.device);
  if (error != cudaSuccess) return error;
  WorkQueue queue;
  queue.section_heads = static_cast<int>(heads_per_section(params));
  const int64_t works = max_query_tiles(params.packing, Shape::kRows, most_decode) * params.num_heads;
  queue.most_decode = most_decode;
  queue.taken = launch.counters;
  const auto clusters =
      static_cast<unsigned>(std::min<int64_t>(works, launch.device.num_multiprocessors / Shape::kBlocks));
  return launch_clusters(kKernel, dim3(clusters * Shape::kBlocks), dim3(Shape::kThreads), Shape::kBlocks,
                         Shape::kSharedBytes, launch, params, maps, queue);
}

// One source file per element type keeps a build parallel.
#define ORTOLAN_INSTANTIATE_SM90_PREFILL(Element, kHeadSize, kKeyRows)                              \
  template cudaError_t launch_sm90_prefill<Element, kHeadSize, kKeyRows>(const SwaAttentionParams&, \
                                                                         const Launch&, int);

}  // namespace ortolan::cuda
