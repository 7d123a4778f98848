// Host side of decode attention: sizes from shapes, one launch to sum and one to combine.
#pragma once

#include <algorithm>

#include "attention_instances.h"
#include "decode_combine.cuh"
#include "launch.cuh"

namespace ortolan::cuda {

struct DecodeLaunch {
  DecodeShape shape;
  int num_stages;
  int shared_bytes;
};

// How many blocks of how many stages stay resident: two blocks overlap one's arithmetic with the other's
// loads.
template <int kHeadSize, int kRowTiles>
DecodeLaunch plan_decode(const SwaAttentionParams& params, const Device& device) {
  using Tile = DecodeTile<kHeadSize, kRowTiles>;
  constexpr int kReservedBytes = 1024;  // of shared memory, per resident block
  const auto kv_heads = static_cast<int>(params.cache.num_kv_heads);
  const auto tokens = static_cast<int>(std::min<int64_t>(params.packing.num_tokens, kDecodeTokens));
  DecodeLaunch plan{};
  DecodeShape& shape = plan.shape;
  shape.group = static_cast<int>(params.num_heads) / kv_heads;
  shape.tile_keys = Tile::kKeys;
  shape.entry_rows = std::min(Tile::kRows, shape.group * tokens);
  shape.row_tiles = (shape.group * tokens + shape.entry_rows - 1) / shape.entry_rows;
  shape.entries = static_cast<int>(params.packing.num_sequences) * kv_heads * shape.row_tiles;
  const int64_t tiles = params.cache.capacity / Tile::kKeys + 4;  // of an entry, at most
  shape.max_spans = static_cast<int>(tiles / kSpanTiles) + 4;

  const int fixed = Tile::kFixedBytes + static_cast<int>((shape.entries + 1) * sizeof(int));
  int resident = 2;
  for (; resident > 0; --resident) {
    const int budget = (device.shared_bytes_per_block + kReservedBytes) / resident - kReservedBytes - fixed;
    plan.num_stages = std::min(kMaxDecodeStages, budget / Tile::kStageBytes);
    if (plan.num_stages >= resident) break;
  }
  plan.shared_bytes = fixed + plan.num_stages * Tile::kStageBytes;
  shape.blocks = static_cast<int>(
      std::min<int64_t>(int64_t{std::max(resident, 1)} * device.num_multiprocessors, shape.entries * tiles));
  return plan;
}

template <typename Element, int kHeadSize, int kRowTiles>
cudaError_t launch_decode(const SwaAttentionParams& params, const Launch& launch) {
  const DecodeLaunch plan = plan_decode<kHeadSize, kRowTiles>(params, launch.device);
  if (plan.num_stages < 1) return cudaErrorInvalidConfiguration;  // too many sequences for shared memory
  const DecodeWorkspace workspace = DecodeWorkspace::of(launch.workspace, plan.shape);
  const auto kernel = decode_kernel<Element, kHeadSize, kRowTiles>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
  if (error != cudaSuccess) return error;
  error = launch_overlapped(kernel, dim3(plan.shape.blocks), dim3(160), plan.shared_bytes, launch, params,
                            plan.shape, workspace, plan.num_stages);
  if (error != cudaSuccess) return error;
  const dim3 rows(static_cast<unsigned>(params.packing.num_tokens), static_cast<unsigned>(params.num_heads));
  const int64_t narrow_blocks = params.packing.num_tokens * params.num_heads * (kHeadSize / 32);
  if (narrow_blocks > 4 * launch.device.num_multiprocessors)
    return launch_overlapped(decode_combine_kernel<Element, kHeadSize, kHeadSize>, rows,
                             dim3(CombineShape<kHeadSize>::kThreads), 0, launch, params, plan.shape,
                             workspace);
  return launch_overlapped(decode_combine_kernel<Element, kHeadSize, 32>,
                           dim3(rows.x, rows.y, kHeadSize / 32), dim3(CombineShape<32>::kThreads), 0, launch,
                           params, plan.shape, workspace);
}

template <typename Element, int kHeadSize, int kRowTiles>
size_t decode_workspace_bytes(const SwaAttentionParams& params, const Device& device) {
  return DecodeWorkspace::bytes(plan_decode<kHeadSize, kRowTiles>(params, device).shape, kHeadSize);
}

// One source file per element type keeps a build parallel.
#define ORTOLAN_INSTANTIATE_DECODE(Element, kHeadSize, kRowTiles)                                  \
  template cudaError_t launch_decode<Element, kHeadSize, kRowTiles>(const SwaAttentionParams&,     \
                                                                    const Launch&);                \
  template size_t decode_workspace_bytes<Element, kHeadSize, kRowTiles>(const SwaAttentionParams&, \
                                                                        const Device&);

}  // namespace ortolan::cuda
