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

  // `cluster` blocks for each kv head, of `most` tiles at most.
  static TokenPlan of(const SwaAttentionParams& params, const DecodeShape& shape, int cluster, int most) {
    const auto whole = [](int bytes) { return (bytes + 15) / 16 * 16; };
    TokenPlan plan;
    plan.shape = in_clusters(shape, cluster);
    plan.shape.stages = divide_up(most, cluster);
    plan.shape.buffers = 1;
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

template <typename Rows>
constexpr int kTokenThreads = kTokenWarps<Rows::kHeadSize> * 32;

// Dynamic shared memory that a block may have.
inline int token_bytes(const Device& device) {
  constexpr int kStaticBytes = 2048;  // and what a block takes beside its own
  return device.shared_bytes_per_block - kStaticBytes;
}

// Blocks for each kv head: as many as are of use, and as the device holds, each by itself on a
// multiprocessor.
template <typename Rows, bool kPaged>
cudaError_t find_token_cluster(const DecodeShape& shape, int most, const Device& device, int& cluster) {
  constexpr auto kernel = token_kernel<Rows, kPaged>;
  cudaError_t error = allow_shared_memory<kernel>(device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cluster = std::min(kMaxCluster, std::max(2, most));
  const auto resident = [&] {
    return resident_clusters<kernel>(dim3(kTokenThreads<Rows>), cluster, token_bytes(device), device);
  };
  while (error == cudaSuccess && cluster > 1 && resident() < shape.entries) --cluster;
  return error;
}

// All of a block's tiles are loaded at once, so these must be few.
template <typename Rows, bool kPaged>
cudaError_t plan_token(const SwaAttentionParams& params, const Device& device, TokenPlan<Rows>& plan) {
  constexpr int kMostTiles = 2;
  const DecodeShape shape = plan_decode<Rows, 1>(params, device);
  const int most = most_tiles(params, shape);
  if (divide_up(most, kMaxCluster) > kMostTiles) return cudaSuccess;
  int cluster = 0;
  const cudaError_t error = find_token_cluster<Rows, kPaged>(shape, most, device, cluster);
  if (error != cudaSuccess || cluster < 2 || divide_up(most, cluster) > kMostTiles) return error;
  const auto tried = TokenPlan<Rows>::of(params, shape, cluster, most);
  if (tried.shared_bytes <= token_bytes(device)) plan = tried;
  return cudaSuccess;
}

template <typename Rows, bool kPaged>
bool launch_token_from(const QkvAttentionParams& p, const Launch& launch, cudaError_t& error) {
  TokenPlan<Rows> plan;
  error = plan_token<Rows, kPaged>(p.attention, launch.device, plan);
  if (error != cudaSuccess) return true;
  if (!plan.shape.blocks) return false;
  error = launch_clusters(token_kernel<Rows, kPaged>, dim3(plan.shape.blocks), dim3(kTokenThreads<Rows>),
                          static_cast<unsigned>(plan.shape.cluster), plan.shared_bytes, launch, p, plan.shape,
                          plan.sizes);
  return true;
}

// False, and nothing launched, where other kernels must take the step.
template <typename Rows>
bool launch_token(const QkvAttentionParams& p, const Launch& launch, cudaError_t& error) {
  return p.attention.cache.block_table ? launch_token_from<Rows, true>(p, launch, error)
                                       : launch_token_from<Rows, false>(p, launch, error);
}

#define ORTOLAN_INSTANTIATE_TOKEN(Element, kHeadSize)                                                 \
  template bool launch_token<DenseRows<Element, kHeadSize>>(const QkvAttentionParams&, const Launch&, \
                                                            cudaError_t&);

}  // namespace ortolan::cuda
