// Host side of decode attention for sm_90a: sizes from shapes, tensor maps, then one launch in clusters, or
// one to sum and one to combine.
#pragma once

#include "kernels/cuda/common/tensor_maps.h"
#include "launch.cuh"
#include "sm90.cuh"

namespace ortolan::cuda {

// Rows that a sequence is expected to bring; one that brings more takes several entries.
inline int expected_rows(const SwaAttentionParams& params) {
  const int64_t sequences = std::max<int64_t>(params.packing.num_sequences, 1);
  const int64_t tokens =
      std::min<int64_t>((params.packing.num_tokens + sequences - 1) / sequences, kSm90DecodeTokens);
  const int64_t rows = params.num_heads / params.cache.num_kv_heads * tokens;
  constexpr int64_t kTile = kDecodeTileRows;
  return static_cast<int>(std::min<int64_t>((rows + kTile - 1) / kTile * kTile, kSm90DecodeRows));
}

template <int kHeadSize>
DecodeShape plan_sm90_decode(const SwaAttentionParams& params, const Device& device) {
  using Shape = Sm90DecodeShape<kHeadSize>;
  constexpr int kMostStages = 12, kGoodStages = 3, kStaticBytes = 512;
  DecodeShape shape = plan_entries(params, device, kSm90DecodeTokens, expected_rows(params), Shape::kTileKeys,
                                   Shape::kSpanTiles);
  shape.warps = 8;
  shape.buffers = 1;
  shape.snaps = shape.entry_rows > kDecodeTileRows;
  // Two streams with too few stages are slower than one.
  for (shape.streams = Shape::kStreams; shape.streams > 0; --shape.streams) {
    for (shape.stages = kMostStages; shape.stages > 0; --shape.stages)
      if (Sm90DecodeShared::bytes<kHeadSize>(shape) + kStaticBytes <= device.shared_bytes_per_block) break;
    if (shape.stages >= kGoodStages || shape.streams == 1) break;
  }
  return shape;
}

// The largest cluster that is of use to each entry, or 0 where the entries do without: a cluster's few blocks
// are slow to combine many or long rows.
template <int kHeadSize>
int largest_sm90_cluster(const SwaAttentionParams& params, const DecodeShape& shape, const Device& device) {
  if (kHeadSize > 256 || params.packing.num_sequences != 1 || shape.row_tiles != 1 ||
      shape.entry_rows > kDecodeTileRows)
    return 0;
  return std::min({kMaxCluster, device.num_multiprocessors / shape.entries, most_tiles(params, shape)});
}

template <typename Element, int kHeadSize>
struct Sm90DecodeLaunch {
  const SwaAttentionParams& params;
  const Launch& launch;
  DecodeShape shape;
  Sm90DecodeMaps maps;

  cudaError_t make_maps() {
    maps.box_rows = copied_rows(params.cache, params.window >= 0, Sm90DecodeShape<kHeadSize>::kKeys);
    const cudaError_t error =
        make_cache_map(maps.keys, params.element, params.key_cache, params.cache, maps.box_rows, false);
    return error != cudaSuccess ? error
                                : make_cache_map(maps.values, params.element, params.value_cache,
                                                 params.cache, maps.box_rows, false);
  }
  int shared_bytes() const { return Sm90DecodeShared::bytes<kHeadSize>(shape); }

  // Puts the shape in clusters where that is faster and the device holds them all at once.
  cudaError_t choose_clusters() {
    int cluster = largest_sm90_cluster<kHeadSize>(params, shape, launch.device);
    if (!clusters_pay(params, shape, cluster, launch.device)) return cudaSuccess;
    constexpr auto kernel = sm90_decode_kernel<Element, kHeadSize, true>;
    cudaError_t error = allow_shared_memory<kernel>(launch.device);
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
    // One block has a multiprocessor to itself, whatever its size: the clusters are as many for all shapes.
    const auto resident = [&] {
      return resident_clusters<kernel>(dim3(Sm90DecodeShape<kHeadSize>::kThreads), cluster, shared_bytes(),
                                       launch.device);
    };
    while (cluster > 1 && resident() < shape.entries) --cluster;
    if (clusters_pay(params, shape, cluster, launch.device)) shape = in_clusters(shape, cluster);
    return cudaSuccess;
  }

  template <bool kClusters>
  cudaError_t enqueue(const DecodeWorkspace& workspace) const {
    constexpr auto kernel = sm90_decode_kernel<Element, kHeadSize, kClusters>;
    if (const cudaError_t error = allow_shared_memory<kernel>(launch.device); error != cudaSuccess)
      return error;
    return launch_clusters(kernel, dim3(shape.blocks), dim3(Sm90DecodeShape<kHeadSize>::kThreads),
                           static_cast<unsigned>(std::max(shape.cluster, 1)), shared_bytes(), launch, params,
                           shape, workspace, maps);
  }

  cudaError_t run() {
    if (shape.stages < 2) return cudaErrorInvalidConfiguration;  // too many sequences for shared memory
    cudaError_t error = make_maps();
    if (error != cudaSuccess) return error;
    if constexpr (kHeadSize <= 256) {
      error = choose_clusters();
      if (error != cudaSuccess) return error;
      if (shape.cluster) return enqueue<true>(DecodeWorkspace::of(launch.workspace, shape));
    }
    const DecodeWorkspace workspace = DecodeWorkspace::of(launch.workspace, shape);
    error = enqueue<false>(workspace);
    return error != cudaSuccess ? error
                                : combine_decode<Element, kHeadSize>(params, shape, workspace, launch);
  }
};

template <typename Element, int kHeadSize>
cudaError_t launch_sm90_decode(const SwaAttentionParams& params, const Launch& launch) {
  return Sm90DecodeLaunch<Element, kHeadSize>{
      params, launch, plan_sm90_decode<kHeadSize>(params, launch.device), {}}
      .run();
}

template <typename Element, int kHeadSize>
size_t sm90_decode_workspace_bytes(const SwaAttentionParams& params, const Device& device) {
  const DecodeShape shape = plan_sm90_decode<kHeadSize>(params, device);
  const int cluster = largest_sm90_cluster<kHeadSize>(params, shape, device);
  const DecodeShape largest = cluster ? in_clusters(shape, cluster) : shape;
  return std::max(DecodeWorkspace::bytes(shape, kHeadSize), DecodeWorkspace::bytes(largest, kHeadSize));
}

// One source file per element type keeps a build parallel.
#define ORTOLAN_INSTANTIATE_SM90_DECODE(Element, kHeadSize)                                              \
  template cudaError_t launch_sm90_decode<Element, kHeadSize>(const SwaAttentionParams&, const Launch&); \
  template size_t sm90_decode_workspace_bytes<Element, kHeadSize>(const SwaAttentionParams&, const Device&);

}  // namespace ortolan::cuda
