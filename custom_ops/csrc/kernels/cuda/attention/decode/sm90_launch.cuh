// Host side of decode attention for sm_90a: sizes from shapes, tensor maps, then one launch in clusters, or
// one to sum and one to combine.
#pragma once

#include "kernels/cuda/common/tensor_maps.h"
#include "launch.cuh"
#include "sm90.cuh"

namespace ortolan::cuda {

template <typename Shape>
DecodeShape plan_sm90_decode(const SwaAttentionParams& params, const Device& device) {
  constexpr int kMostStages = 12, kGoodStages = 3, kStaticBytes = 512;
  DecodeShape shape =
      plan_entries(params, device, Shape::kMostTokens, expected_rows(params, Shape::kMostTokens),
                   Shape::kTileKeys, Shape::kSpanTiles);
  shape.warps = 8;
  shape.buffers = 1;
  if (shape.entry_rows > kDecodeTileRows) shape.snaps_from = Shape::kSnapsFrom;
  // Two streams with too few stages are slower than one.
  for (shape.streams = Shape::kStreams; shape.streams > 0; --shape.streams) {
    for (shape.stages = kMostStages; shape.stages > 0; --shape.stages)
      if (Sm90DecodeShared::bytes<Shape>(shape) + kStaticBytes <= device.shared_bytes_per_block) break;
    if (shape.stages >= kGoodStages || shape.streams == 1) break;
  }
  return shape;
}

// The largest cluster that is of use to each entry, or 0 where the entries do without: a cluster's few blocks
// are slow to combine many or long rows.
template <typename Shape>
int largest_sm90_cluster(const SwaAttentionParams& params, const DecodeShape& shape, const Device& device) {
  if (!Shape::kHasClusters || params.packing.num_sequences != 1 || shape.row_tiles != 1 ||
      shape.entry_rows > kDecodeTileRows)
    return 0;
  return std::min({kMaxCluster, device.num_multiprocessors / shape.entries, most_tiles(params, shape)});
}

template <typename Rows>
struct Sm90DecodeLaunch {
  using Shape = typename Rows::Shape;

  const SwaAttentionParams& params;
  const Launch& launch;
  DecodeShape shape;
  Sm90DecodeMaps maps;

  cudaError_t make_maps() {
    maps.box_rows = copied_rows(params.cache, params.window >= 0, Shape::kKeys);
    const cudaError_t error =
        make_cache_map(maps.keys, params.element, params.key_cache, params.cache, maps.box_rows, false);
    return error != cudaSuccess ? error
                                : make_cache_map(maps.values, params.element, params.value_cache,
                                                 params.cache, maps.box_rows, false);
  }
  int shared_bytes() const { return Sm90DecodeShared::bytes<Shape>(shape); }

  // Puts the shape in clusters where that is faster and the device holds them all at once.
  cudaError_t choose_clusters() {
    int cluster = largest_sm90_cluster<Shape>(params, shape, launch.device);
    if (!clusters_pay(params, shape, cluster, launch.device)) return cudaSuccess;
    constexpr auto kernel = sm90_decode_kernel<Rows, true>;
    cudaError_t error = allow_shared_memory<kernel>(launch.device);
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
    // One block has a multiprocessor to itself, whatever its size: the clusters are as many for all shapes.
    const auto resident = [&] {
      return resident_clusters<kernel>(dim3(Shape::kThreads), cluster, shared_bytes(), launch.device);
    };
    while (cluster > 1 && resident() < shape.entries) --cluster;
    if (clusters_pay(params, shape, cluster, launch.device)) shape = in_clusters(shape, cluster);
    return cudaSuccess;
  }

  template <bool kClusters>
  cudaError_t enqueue(const DecodeWorkspace& workspace) const {
    constexpr auto kernel = sm90_decode_kernel<Rows, kClusters>;
    if (const cudaError_t error = allow_shared_memory<kernel>(launch.device); error != cudaSuccess)
      return error;
    return launch_clusters(kernel, dim3(shape.blocks), dim3(Shape::kThreads),
                           static_cast<unsigned>(std::max(shape.cluster, 1)), shared_bytes(), launch, params,
                           shape, workspace, maps);
  }

  cudaError_t run() {
    if (shape.stages < 2) return cudaErrorInvalidConfiguration;  // too many sequences for shared memory
    cudaError_t error = make_maps();
    if (error != cudaSuccess) return error;
    if constexpr (Shape::kHasClusters) {
      error = choose_clusters();
      if (error != cudaSuccess) return error;
      if (shape.cluster) return enqueue<true>(DecodeWorkspace::of(launch.workspace, shape));
    }
    const DecodeWorkspace workspace = DecodeWorkspace::of(launch.workspace, shape);
    error = enqueue<false>(workspace);
    return error != cudaSuccess
               ? error
               : combine_decode<typename Rows::Element, Shape::kHeadSize>(params, shape, workspace, launch);
  }
};

template <typename Rows>
cudaError_t launch_sm90_decode(const SwaAttentionParams& params, const Launch& launch) {
  return Sm90DecodeLaunch<Rows>{
      params, launch, plan_sm90_decode<typename Rows::Shape>(params, launch.device), {}}
      .run();
}

template <typename Rows>
size_t sm90_decode_workspace_bytes(const SwaAttentionParams& params, const Device& device) {
  using Shape = typename Rows::Shape;
  const DecodeShape shape = plan_sm90_decode<Shape>(params, device);
  const int cluster = largest_sm90_cluster<Shape>(params, shape, device);
  const DecodeShape largest = cluster ? in_clusters(shape, cluster) : shape;
  return std::max(DecodeWorkspace::bytes(shape, Shape::kHeadSize),
                  DecodeWorkspace::bytes(largest, Shape::kHeadSize));
}

// One source file per element type keeps a build parallel.
#define ORTOLAN_INSTANTIATE_SM90_DECODE(Rows, ...)                                                      \
  template cudaError_t launch_sm90_decode<Rows<__VA_ARGS__>>(const SwaAttentionParams&, const Launch&); \
  template size_t sm90_decode_workspace_bytes<Rows<__VA_ARGS__>>(const SwaAttentionParams&, const Device&);

}  // namespace ortolan::cuda
