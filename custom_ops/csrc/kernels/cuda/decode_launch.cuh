// Host side of decode attention: sizes from shapes, one launch to sum and one to combine.
#pragma once

#include <algorithm>

#include "attention_instances.h"
#include "decode.cuh"
#include "launch.cuh"

namespace ortolan::cuda {

template <int kHeadSize, int kRowTiles>
int decode_shared_bytes(const DecodeShape& shape) {
  return DecodeShared::bytes(shape, DecodeStage<kHeadSize>::bytes(shape.tile_keys), 8 * kRowTiles);
}

// As many warps as leave three stages in shared memory; with few, fewer stages will do.
template <int kHeadSize, int kRowTiles>
DecodeShape plan_decode(const SwaAttentionParams& params, const Device& device) {
  constexpr int kMaxStages = 6, kGoodStages = 3, kStaticBytes = 2048;
  const auto kv_heads = static_cast<int>(params.cache.num_kv_heads);
  const auto tokens = static_cast<int>(std::min<int64_t>(params.packing.num_tokens, kDecodeTokens));
  DecodeShape shape{};
  shape.kv_heads = kv_heads;
  shape.group = static_cast<int>(params.num_heads) / kv_heads;
  shape.entry_rows = std::min(8 * kRowTiles, (shape.group * tokens + 3) / 4 * 4);
  shape.row_tiles = (shape.group * tokens + shape.entry_rows - 1) / shape.entry_rows;
  shape.pairs = static_cast<int>(params.packing.num_sequences) * kv_heads;
  shape.entries = shape.pairs * shape.row_tiles;
  for (shape.warps = kMaxDecodeWarps<kHeadSize>; shape.warps > 0; shape.warps /= 2) {
    shape.tile_keys = shape.warps * kWarpKeys<kHeadSize>;
    const auto fits = [&] {
      return decode_shared_bytes<kHeadSize, kRowTiles>(shape) + kStaticBytes <= device.shared_bytes_per_block;
    };
    for (shape.stages = kMaxStages; shape.stages > 0 && !fits();) --shape.stages;
    if (shape.stages >= std::min(kGoodStages, 1 + shape.warps)) break;
  }
  const int64_t tiles = params.cache.capacity / std::max(shape.tile_keys, 1) + 4;  // of an entry, at most
  shape.max_spans = static_cast<int>(tiles / kSpanTiles) + 4;
  shape.blocks = static_cast<int>(std::min<int64_t>(device.num_multiprocessors, shape.entries * tiles));
  while (1 << shape.tile_shift < shape.tile_keys) ++shape.tile_shift;
  shape.by_group = Divisor::of(shape.group);
  shape.by_kv_heads = Divisor::of(kv_heads);
  shape.by_pairs = Divisor::of(shape.pairs);
  shape.by_blocks = Divisor::of(shape.blocks);
  return shape;
}

template <typename Element, int kHeadSize>
cudaError_t combine_decode(const SwaAttentionParams& params, const DecodeShape& shape,
                           const DecodeWorkspace& workspace, const Launch& launch) {
  constexpr int kWide = std::min(kHeadSize, 128);  // columns of a block where rows fill the device
  // A window's spans may lie anywhere in their rounds.
  const int spans = params.window < 0 ? std::min(kRoundSpans, shape.max_spans) : kRoundSpans;
  const int64_t rows = params.packing.num_tokens * params.num_heads;
  const bool by_token = rows < int64_t{shape.entries} * shape.entry_rows;
  const auto enqueue = [&](auto kernel, int columns, int threads) {
    const dim3 grid(static_cast<unsigned>(by_token ? params.packing.num_tokens : shape.entries),
                    static_cast<unsigned>(by_token ? params.num_heads : shape.entry_rows),
                    kHeadSize / columns);
    return launch_overlapped(kernel, grid, dim3(threads), SpanRound::bytes(spans, columns), launch, params,
                             shape, workspace, spans, by_token);
  };
  if (std::min<int64_t>(rows, shape.entries * shape.entry_rows) * (kHeadSize / 32) >
      2 * launch.device.num_multiprocessors)
    return enqueue(decode_combine_kernel<Element, kHeadSize, kWide, 128>, kWide, 128);
  return enqueue(decode_combine_kernel<Element, kHeadSize, 32, 256>, 32, 256);
}

template <typename Element, int kHeadSize, int kRowTiles>
cudaError_t launch_decode(const SwaAttentionParams& params, const Launch& launch) {
  const DecodeShape shape = plan_decode<kHeadSize, kRowTiles>(params, launch.device);
  if (shape.warps < 1) return cudaErrorInvalidConfiguration;  // too many sequences for shared memory
  const DecodeWorkspace workspace = DecodeWorkspace::of(launch.workspace, shape);
  const int shared_bytes = decode_shared_bytes<kHeadSize, kRowTiles>(shape);
  const auto kernel = decode_kernel<Element, kHeadSize, kRowTiles>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const dim3 block((shape.warps + kLoadWarps + kMergeWarps) * 32);
  error =
      launch_overlapped(kernel, dim3(shape.blocks), block, shared_bytes, launch, params, shape, workspace);
  if (error != cudaSuccess) return error;
  return combine_decode<Element, kHeadSize>(params, shape, workspace, launch);
}

template <typename Element, int kHeadSize, int kRowTiles>
size_t decode_workspace_bytes(const SwaAttentionParams& params, const Device& device) {
  return DecodeWorkspace::bytes(plan_decode<kHeadSize, kRowTiles>(params, device), kHeadSize);
}

// One source file per element type keeps a build parallel.
#define ORTOLAN_INSTANTIATE_DECODE(Element, kHeadSize, kRowTiles)                                  \
  template cudaError_t launch_decode<Element, kHeadSize, kRowTiles>(const SwaAttentionParams&,     \
                                                                    const Launch&);                \
  template size_t decode_workspace_bytes<Element, kHeadSize, kRowTiles>(const SwaAttentionParams&, \
                                                                        const Device&);

}  // namespace ortolan::cuda
