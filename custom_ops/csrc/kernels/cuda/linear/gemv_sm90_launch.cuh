// Host side of gemv_sm90.cuh: how a launch shares its rows and its blocks' memory.
#pragma once

#include <algorithm>
#include <numeric>

#include "gemv_sm90.cuh"

namespace ortolan::cuda {

// Shared memory that a block takes beside its own, and for the norm's sums.
constexpr int kReservedBytes = 1024, kStaticBytes = 128;
// What a gated layer's block takes; those of the other layers fit beside it. One of the two has more than
// half of a multiprocessor, so that its blocks spread evenly even where attention still holds some
// multiprocessors: the gated layer's or, where rows are long, the others', which could hold too few of theirs
// otherwise. By measurements on an H200.
inline int gated_bytes(const FusedLinearParams& p) {
  constexpr int64_t kMedium = 2560, kLong = 3072;             // elements of the model's rows
  const int64_t row = std::min(p.num_inputs, p.num_outputs);  // the shorter side of the layer's weights
  return row >= kLong ? 98304 : row >= kMedium ? 131072 : 139264;
}

// False where another kernel must multiply.
template <typename Element, int kTokens, bool kGated>
bool plan_stream(const FusedLinearParams& p, const Device& device, GemvStream& stream) {
  constexpr int kPartsBytes = 4096;  // of a turn, about
  constexpr int kOutputs = GemvWeights<Element, kTokens, kGated>::kOutputs;
  const int64_t row_bytes = p.num_inputs * static_cast<int64_t>(sizeof(Element));
  const int64_t limit = device.shared_bytes_per_block;
  const auto ceil = [](int64_t a, int64_t b) { return static_cast<int>(divide_up(a, b)); };
  if (p.num_outputs > kMaxOutputs) return false;
  const int all_groups = ceil(p.num_outputs, kOutputs);
  stream.blocks = std::min(device.num_multiprocessors, all_groups);
  stream.groups_per_block = all_groups / stream.blocks;
  stream.larger_blocks = all_groups % stream.blocks;
  const RowSlices slices = RowSlices::of(row_bytes);
  stream.slices = slices.count;
  stream.slice_bytes = slices.bytes;
  stream.step = UnitStep::of(kGemvWarps, slices.count);
  const int groups = ceil(all_groups, stream.blocks);
  const int part_bytes = kTokens * stream.slices * GemvStream::kParts * static_cast<int>(sizeof(float));
  const int most_groups = std::min(groups, kGemvThreads / kTokens / kOutputs);
  stream.groups_per_turn = std::clamp(kPartsBytes / part_bytes / GemvStream::kLines, 1, most_groups);
  stream.norm_bytes = p.norm_weight ? static_cast<int>(row_bytes) : 0;
  stream.buffers = 0;
  const auto fitting = [&](int64_t bytes) {
    const int64_t fixed = stream.shared_bytes(kTokens * row_bytes, kTokens) + kStaticBytes;
    return (bytes - fixed) / (GemvStream::kBufferBytes + static_cast<int>(sizeof(Barrier)));
  };
  const int64_t beside = kGated ? gated_bytes(p) : limit - kReservedBytes - gated_bytes(p);
  // At the end of a turn a warp with a unit less waits for the others, and soon all of its buffers are full.
  // With few of them, turns are cut so that all warps have as many units.
  const int even_groups = kGemvWarps / std::gcd(stream.slices, kGemvWarps);
  const int even_turn = stream.groups_per_turn / even_groups * even_groups;
  if (stream.groups_per_turn < groups && fitting(beside) < 3 * kGemvWarps &&
      2 * even_turn >= stream.groups_per_turn)
    stream.groups_per_turn = even_turn;
  int64_t most = fitting(beside);
  if (most < kGemvWarps) most = fitting(limit);
  if (most < kGemvWarps) return false;
  most = std::min<int64_t>(most, GemvStream::kMaxBuffers);
  stream.buffers = static_cast<int>(std::clamp<int64_t>(int64_t{groups} * stream.slices, kGemvWarps, most));
  return true;
}

// False, and nothing launched, likewise.
template <typename Element, int kTokens, bool kGated>
bool launch_gemv_stream(const FusedLinearParams& p, const GemvPass& pass, const Launch& launch,
                        cudaError_t& error) {
  if (launch.device.compute_capability != 90) return false;
  GemvStream stream{};
  if (!plan_stream<Element, kTokens, kGated>(p, launch.device, stream)) return false;
  constexpr auto kKernel = gemv_stream_kernel<Element, kTokens, kGated>;
  int bytes = stream.shared_bytes(kTokens * p.num_inputs * static_cast<int64_t>(sizeof(Element)), kTokens);
  if (kGated) bytes = std::max(bytes, gated_bytes(p) - kStaticBytes);
  error = allow_shared_memory<kKernel>(launch.device);
  if (error == cudaSuccess)
    error = launch_overlapped(kKernel, dim3(static_cast<unsigned>(stream.blocks)), dim3(kGemvThreads), bytes,
                              launch, p, pass, stream);
  return true;
}

}  // namespace ortolan::cuda
