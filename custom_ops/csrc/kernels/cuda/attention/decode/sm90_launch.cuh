// Host side of decode attention for sm_90a: sizes from shapes, tensor maps, then one launch to sum and one to
// combine.
#pragma once

#include "kernels/cuda/common/tensor_maps.h"
#include "launch.cuh"
#include "sm90.cuh"

namespace ortolan::cuda {

template <typename Shape>
DecodeShape plan_sm90_decode(const SwaAttentionParams& params, const Device& device) {
  constexpr int kMostStages = 12, kStaticBytes = 512;
  DecodeShape shape =
      plan_entries(params, device, decode_tokens(params, Shape::kMostTokens),
                   expected_rows(params, Shape::kMostTokens), Shape::kTileKeys, Shape::kSpanTiles);
  shape.warps = 8;
  shape.buffers = 1;
  shape.may_snap = shape.entry_rows > kDecodeTileRows && shape.span_tiles.shift > 0;
  for (shape.stages = kMostStages; shape.stages > 0; --shape.stages)
    if (Sm90DecodeShared::bytes<Shape>(shape) + kStaticBytes <= device.shared_bytes_per_block) break;
  return shape;
}

template <typename Rows>
cudaError_t launch_sm90_decode(const SwaAttentionParams& params, const Launch& launch) {
  using Shape = typename Rows::Shape;
  DecodeShape shape = plan_sm90_decode<Shape>(params, launch.device);
  shape.is_behind = launch.is_behind;
  if (shape.stages < Shape::kLeastStages)
    return cudaErrorInvalidConfiguration;  // too many sequences for shared memory
  Sm90DecodeMaps maps;
  maps.box_rows = copied_rows(params.cache, params.window >= 0, Shape::kKeys);
  cudaError_t error =
      make_cache_map(maps.keys, params.element, params.key_cache, params.cache, maps.box_rows, false);
  if (error == cudaSuccess)
    error =
        make_cache_map(maps.values, params.element, params.value_cache, params.cache, maps.box_rows, false);
  constexpr auto kernel = sm90_decode_kernel<Rows>;
  if (error == cudaSuccess) error = allow_shared_memory<kernel>(launch.device);
  const DecodeWorkspace workspace = DecodeWorkspace::of(launch.workspace, shape);
  if (error == cudaSuccess)
    error = launch_overlapped(kernel, dim3(shape.blocks), dim3(kSm90DecodeThreads),
                              Sm90DecodeShared::bytes<Shape>(shape), launch, params, shape, workspace, maps);
  return error != cudaSuccess
             ? error
             : combine_decode<typename Rows::Element, Shape::kHeadSize>(params, shape, workspace, launch);
}

template <typename Rows>
size_t sm90_decode_workspace_bytes(const SwaAttentionParams& params, const Device& device) {
  using Shape = typename Rows::Shape;
  return DecodeWorkspace::bytes(plan_sm90_decode<Shape>(params, device), Shape::kHeadSize);
}

// One source file per element type keeps a build parallel.
#define ORTOLAN_INSTANTIATE_SM90_DECODE(Rows, ...)                                                      \
  template cudaError_t launch_sm90_decode<Rows<__VA_ARGS__>>(const SwaAttentionParams&, const Launch&); \
  template size_t sm90_decode_workspace_bytes<Rows<__VA_ARGS__>>(const SwaAttentionParams&, const Device&);

}  // namespace ortolan::cuda
