// Host side of token.cuh: whether it takes a step, and in clusters of how many blocks.
#pragma once

#include <algorithm>

#include "launch.cuh"
#include "token.cuh"

namespace ortolan::cuda {

// How one token's kernel is launched.
template <typename Rows>
struct TokenPlan {
  DecodeShape shape{};  // without blocks where others take the step
  TokenSizes sizes{};
  int shared_bytes = 0;
  int share = 1;  // blocks on some multiprocessors

  // `cluster` blocks for each kv head, of `most` tiles at most.
  static TokenPlan of(const SwaAttentionParams& params, const DecodeShape& shape, int cluster, int most) {
    const auto whole = [](int bytes) { return (bytes + 15) / 16 * 16; };
    TokenPlan plan;
    plan.shape = in_clusters(shape, cluster);
    plan.shape.stages = plan.shape.buffers = 1;
    const bool is_plain = params.window >= 0 && params.causal && !params.prefix_end && params.cache.sink == 0;
    plan.sizes.may_join = is_plain && most > cluster && 2 * shape.group <= kDecodeTileRows;
    if (plan.sizes.may_join) plan.shape.entry_rows = whole_quads(2 * shape.group);
    plan.shape.by_page = Divisor::of(static_cast<uint32_t>(params.cache.page_slots));
    plan.shape.received = TokenShared<Rows>::received_offset(plan.shape);
    plan.shape.received_tiles = most;
    const auto units = ClusterUnits::of<Rows::kHeadSize>(shape.group, cluster, plan.shape.by_line);
    // A window's spans may lie anywhere in their rounds.
    plan.sizes.spans = params.window < 0 ? std::min(kRoundSpans, shape.max_spans) : kRoundSpans;
    plan.sizes.received_bytes = whole(ReceivedSums::bytes(units, most));
    plan.sizes.merge_bytes = whole(SpanRound::bytes(plan.sizes.spans, 1 << units.columns.shift));
    plan.shared_bytes = TokenShared<Rows>::bytes(plan.shape, plan.sizes);
    return plan;
  }
};

// Shared memory that each of some blocks on a multiprocessor may have.
inline int token_bytes(const Device& device, int share) {
  constexpr int kStaticBytes = 2048;  // and what a block takes beside its own
  return device.shared_bytes_per_block / share - kStaticBytes;
}

// Clusters of so many blocks that the device holds at once.
template <typename Rows, int kShare>
int resident_token_clusters(int cluster, const Device& device) {
  return resident_clusters<token_kernel<Rows, kShare>>(dim3(kTokenThreads<Rows::kHeadSize, kShare>), cluster,
                                                       token_bytes(device, kShare), device);
}

template <typename Rows, int kShare>
cudaError_t allow_token_kernel(const Device& device) {
  constexpr auto kernel = token_kernel<Rows, kShare>;
  const cudaError_t error = allow_shared_memory<kernel>(device);
  return error != cudaSuccess
             ? error
             : cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// A block takes its tiles one by one, which is slower than decode.cuh from a few on. As many blocks as the
// device holds, two on some multiprocessors; or, where each has two tiles at most even so, as many as have a
// multiprocessor to themselves.
template <typename Rows>
cudaError_t plan_token(const SwaAttentionParams& params, const Device& device, TokenPlan<Rows>& plan) {
  constexpr int kMostTiles = 3, kAloneTiles = 2;
  const DecodeShape shape = plan_decode<Rows, 1>(params, device);
  const int most = most_tiles(params, shape);
  if (divide_up(most, kMaxCluster) > kMostTiles) return cudaSuccess;
  cudaError_t error = allow_token_kernel<Rows, 1>(device);
  if (error == cudaSuccess) error = allow_token_kernel<Rows, 2>(device);
  if (error != cudaSuccess) return error;
  // Blocks without tiles are of use, too: they merge.
  const int useful = std::max({2, most, ClusterUnits::most<Rows::kHeadSize>(shape.group)});
  for (int cluster = std::min(kMaxCluster, useful); cluster >= 2; --cluster) {
    const int tiles = divide_up(most, cluster);
    if (tiles > kMostTiles) break;
    TokenPlan<Rows> tried = TokenPlan<Rows>::of(params, shape, cluster, most);
    const bool are_alone = resident_token_clusters<Rows, 1>(cluster, device) >= shape.entries;
    tried.share = are_alone ? 1 : 2;
    const bool fits = tried.shared_bytes <= token_bytes(device, tried.share) &&
                      (are_alone || resident_token_clusters<Rows, 2>(cluster, device) >= shape.entries);
    if (fits && (!plan.shape.blocks || tiles <= kAloneTiles)) plan = tried;
    if (are_alone) break;
  }
  return cudaSuccess;
}

// False, and nothing launched, where other kernels must take the step.
template <typename Rows>
bool launch_token(const QkvAttentionParams& p, const Launch& launch, cudaError_t& error) {
  TokenPlan<Rows> plan;
  error = plan_token<Rows>(p.attention, launch.device, plan);
  if (error != cudaSuccess) return true;
  if (!plan.shape.blocks) return false;
  const auto enqueue = [&]<int kShare>() {
    return launch_clusters(
        token_kernel<Rows, kShare>, dim3(plan.shape.blocks), dim3(kTokenThreads<Rows::kHeadSize, kShare>),
        static_cast<unsigned>(plan.shape.cluster), plan.shared_bytes, launch, p, plan.shape, plan.sizes);
  };
  error = plan.share == 1 ? enqueue.template operator()<1>() : enqueue.template operator()<2>();
  return true;
}

#define ORTOLAN_INSTANTIATE_TOKEN(Element, kHeadSize)                                                 \
  template bool launch_token<DenseRows<Element, kHeadSize>>(const QkvAttentionParams&, const Launch&, \
                                                            cudaError_t&);

}  // namespace ortolan::cuda
