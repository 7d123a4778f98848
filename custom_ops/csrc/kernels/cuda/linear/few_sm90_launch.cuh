// Host side of few_sm90.cuh: how its blocks share a layer, by the layer and the number of tokens; one launch.
#pragma once

#include <algorithm>

#include "few_sm90.cuh"
#include "kernels/cuda/common/tensor_maps.h"

namespace ortolan::cuda {

// Of a block's shared memory beside its own.
constexpr int kFewReservedBytes = 1024;
// What a block takes where it can: half of a multiprocessor, so that the next layer's weights are on their
// way before the last block of this one is done.
constexpr int kFewSharedBytes = 115712;
// What it takes at most where that holds all its weights.
constexpr int kFewWholeBytes = 131072;
// Of weights, from which on a block takes groups of two tiles.
constexpr int64_t kFewLongBytes = 196608;

// Bytes of weights for each multiprocessor.
inline int64_t few_block_bytes(const FusedLinearParams& p, const Device& device) {
  const int64_t rows = p.num_outputs * (p.activation == GatedActivation::kNone ? 1 : 2);
  return rows * p.num_inputs * 2 / device.num_multiprocessors;
}

// Shares the shared memory of blocks in clusters of so many. Returns the buffers that hold all of a warp's
// weights; those that there are may be fewer. `block_groups`: of a block that is its own cluster, at most;
// how many clusters of several blocks there are is not known yet.
template <int kTiles, bool kChain>
int divide_few_memory(FewStream& stream, int block_groups, int limit, int cluster) {
  constexpr int kMaxSumsBytes = 24576;
  constexpr int kMostTurnGroups = FewStream::kMaxTurnRows / (kTiles * FewStream::kTileRows);
  stream.cluster = cluster;
  stream.block_slices = static_cast<int>(divide_up(stream.slices.count, cluster));
  stream.token_stride = stream.block_slices * stream.slices.bytes + (kChain ? 32 : 64);
  const int units = cluster == 1 ? block_groups * stream.block_slices : FewStream::kMaxRounds * kGemvWarps;
  const int steps = stream.slices.bytes / RowSlices::kStepBytes;  // of a unit
  const int all = std::max(static_cast<int>(divide_up(units, kGemvWarps)) * steps, FewStream::kMinRounds);
  stream.warps = std::min(units, kGemvWarps);
  stream.groups_per_turn = cluster == 1 ? std::min(kMostTurnGroups, block_groups) : kMostTurnGroups;
  stream.rounds = 0;
  const auto sums_bytes = [&] { return 2 * static_cast<int>(sizeof(float)) * stream.turn_sums(); };
  while (stream.groups_per_turn > 1 && sums_bytes() > kMaxSumsBytes) --stream.groups_per_turn;
  const int round_bytes = stream.warps * (kTiles * FewStream::kTileBytes + static_cast<int>(sizeof(Barrier)));
  stream.rounds = std::min({(limit - stream.shared_bytes()) / round_bytes, FewStream::kMaxRounds, all});
  return all;
}

// One way to share a layer: the first that fits is taken.
struct FewAttempt {
  int most_tiles;          // of a group
  int cluster;             // blocks
  int limit;               // bytes of a block's shared memory
  bool holds_all = false;  // fits only where buffers hold all of a warp's weights
};

// False where the inputs of so many tokens do not fit, or rows are not whole columns of the tensor copies.
template <int kTiles, bool kChain>
bool plan_few(const FusedLinearParams& p, int tokens, int groups, bool in_clusters, const Device& device,
              FewStream& stream) {
  if (p.num_inputs % FewStream::kColumns != 0 || p.num_inputs > (1 << 20)) return false;
  const auto block_groups = static_cast<int>(divide_up(groups, std::min(groups, device.num_multiprocessors)));
  stream.tiles = kTiles;
  stream.tokens = tokens;
  stream.slices = RowSlices::of(p.num_inputs * 2);
  stream.norm_bytes = p.norm_weight ? stream.slices.row_bytes : 0;
  const int most = device.shared_bytes_per_block - kFewReservedBytes;
  const FewAttempt attempts[] = {{1, 1, kFewWholeBytes, true},
                                 {1, 1, kFewSharedBytes},
                                 {2, 1, most},
                                 {2, 2, most},
                                 {2, 4, most},
                                 {2, 8, most}};
  for (const FewAttempt& attempt : attempts) {
    const int cluster = attempt.cluster;
    if (kTiles > attempt.most_tiles || in_clusters != (cluster > 1) || cluster > stream.slices.count)
      continue;
    const int all = divide_few_memory<kTiles, kChain>(stream, block_groups, attempt.limit, cluster);
    const bool keeps_all_busy = kTiles == 1 || stream.groups_per_turn * stream.block_slices >= kGemvWarps;
    if (stream.rounds >= (attempt.holds_all ? all : FewStream::kMinRounds) && keeps_all_busy) return true;
  }
  return false;
}

template <bool kGated>
cudaError_t make_few_map(CUtensorMap& map, const FusedLinearParams& p) {
  constexpr int64_t kHalves = kGated ? 2 : 1;
  const int64_t row_bytes = p.num_inputs * 2;
  return make_tensor_map(map, p.element, p.weight,
                         {{FewStream::kColumns, p.num_outputs, kHalves, p.num_inputs / FewStream::kColumns},
                          {row_bytes, p.num_outputs * row_bytes, 2 * FewStream::kColumns},
                          {FewStream::kColumns, FewStream::kTileRows / kHalves, kHalves,
                           RowSlices::kStepBytes / (2 * FewStream::kColumns)}});
}

// Multiplies the tokens of a pass in groups of kTiles tiles, by clusters of several blocks or of one. False,
// and nothing launched, where their inputs do not fit so.
template <typename Element, int kTiles, bool kGated, bool kChain>
bool launch_few_tiles(const FusedLinearParams& p, const GemvPass& pass, bool in_clusters,
                      const Launch& launch, cudaError_t& error) {
  FewParams params{p, pass, {}, {}};
  FewStream& stream = params.stream;
  constexpr auto kKernel = few_stream_kernel<Element, kTiles, kGated, kChain>;
  const int64_t all_groups = divide_up(p.num_outputs, FewWeights<kTiles, kGated>::kOutputs);
  if (p.num_outputs > kMaxOutputs) return false;
  const auto groups = static_cast<int>(all_groups);
  if (!plan_few<kTiles, kChain>(p, pass.num_tokens, groups, in_clusters, launch.device, stream)) return false;
  const dim3 block(kGemvThreads);
  int clusters = launch.device.num_multiprocessors;
  error = make_few_map<kGated>(params.weight, p);
  if (error == cudaSuccess) error = allow_shared_memory<kKernel>(launch.device);
  if (error != cudaSuccess) return true;
  if (stream.cluster > 1)
    clusters = std::max(
        resident_clusters<kKernel>(block, stream.cluster,
                                   launch.device.shared_bytes_per_block - kFewReservedBytes, launch.device),
        1);
  clusters = std::min(clusters, groups);
  stream.groups_per_cluster = groups / clusters;
  stream.larger_clusters = groups % clusters;
  error = launch_clusters(kKernel, dim3(static_cast<unsigned>(clusters * stream.cluster)), block,
                          stream.cluster, stream.shared_bytes(), launch, params);
  return true;
}

// The same. Two tiles share what is read of the inputs, and one buffer's wait: for layers that keep all warps
// busy for long.
template <typename Element, bool kGated, bool kChain>
bool launch_few_stream(const FusedLinearParams& p, const GemvPass& pass, const Launch& launch,
                       cudaError_t& error) {
  if (launch.device.compute_capability != 90) return false;
  const bool is_long = few_block_bytes(p, launch.device) >= kFewLongBytes;
  // Blocks of a cluster wait for each other at the end of each turn.
  for (const bool in_clusters : {false, true})
    if ((is_long && launch_few_tiles<Element, 2, kGated, kChain>(p, pass, in_clusters, launch, error)) ||
        launch_few_tiles<Element, 1, kGated, kChain>(p, pass, in_clusters, launch, error))
      return true;
  return false;
}

}  // namespace ortolan::cuda
