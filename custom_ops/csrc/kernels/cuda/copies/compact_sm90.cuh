// KvCompact from sm_90 on: clusters of blocks move the rows of a head.
//
// Grid: one cluster of blocks per (slice of columns, kv head and K or V, sequence). The kept rows are cut
// into rounds, a round into one tile per block. Thread (x, y) of a block owns 16-byte column x of the rows y,
// y + blockDim.y, ... of its block's tiles: it copies them to its own places in shared memory, and stores
// them from there once the whole cluster has loaded that round. Rounds of the blocks that share a
// multiprocessor overlap.
//
// Why in place is safe. keep is strictly ascending from 0, so keep[k] >= k. Let a round hold the rows k in
// [a, z). Its stores write [a, z). Whatever is read there is the source of a row below z, of this round or of
// an earlier one, and those have been loaded when the cluster's barrier opens. Loads wait for nothing: stores
// of earlier rounds write below a, where no source of this round lies. So a load may be early but never late,
// each target has one owner, and the result does not depend on timing. The barrier need not order memory:
// nothing that was stored is loaded again, and what was loaded has arrived. The blocks of a cluster run at
// the same time by definition: no block waits for one that has not started. An invalid list breaks the order
// of moves but not the bounds.
#pragma once

#include <algorithm>

#include "compact_rows.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"

namespace ortolan::cuda {

constexpr int kClusterPieces = 4;
constexpr int kClusterThreads = 256;

__global__ void __launch_bounds__(kClusterThreads, 5)
    move_rows_clustered(const KvCompactParams p, uint32_t row_bytes) {
#if __CUDA_ARCH__ >= 900
  __shared__ uint4 places[kClusterPieces * kClusterThreads];
  launch_dependents();
  wait_for_previous_kernel();
  const int blocks = cluster_size(), rank = blockIdx.x % blocks, slice = blockIdx.x / blocks;
  const CompactRows rows(p, blockIdx.z, blockIdx.y >> 1);
  char* cache = static_cast<char*>(blockIdx.y & 1 ? p.value_cache : p.key_cache) +
                (slice * blockDim.x + threadIdx.x) * 16;
  const int64_t tile = blockDim.y * kClusterPieces, step = blocks * tile;
  const int64_t first = rank * tile + threadIdx.y;
  const auto index = [&](int64_t round, int j) { return round * step + first + j * blockDim.y; };
  uint4* const own = places + threadIdx.y * blockDim.x + threadIdx.x;
  int64_t rounds = (rows.count + step - 1) / step;
  int32_t kept[kClusterPieces], leader = 0;  // of the round after the one that was located last
  int64_t source[kClusterPieces];
  uint32_t moving = 0;  // bit j: piece j moves
  const auto look_up = [&](int64_t round) {
#pragma unroll
    for (int j = 0; j < kClusterPieces; ++j) kept[j] = rows.kept(index(round, j));
    leader = rows.kept(round * step);
  };
  const auto locate = [&](int64_t round) {
#pragma unroll
    for (int j = 0; j < kClusterPieces; ++j) source[j] = kept[j] == index(round, j) ? -1 : rows.row(kept[j]);
  };
  const auto load = [&] {
    moving = 0;
#pragma unroll
    for (int j = 0; j < kClusterPieces; ++j) {
      if (source[j] < 0) continue;
      moving |= 1u << j;
      copy_async_16(own + j * kClusterThreads, cache + source[j] * row_bytes, true);
    }
    copy_async_commit();
  };
  look_up(0);
  locate(0);
  look_up(1);
  load();
  int32_t ahead = leader;  // of the next round: where a list ends, rounds end for the whole cluster
  locate(1);
  look_up(2);
  for (int64_t round = 0; round < rounds; ++round) {
    copy_async_wait<0>();
    cluster_arrive();
    if (ahead < 0) rounds = min(rounds, round + 1);
    int64_t target[kClusterPieces];
#pragma unroll
    for (int j = 0; j < kClusterPieces; ++j) target[j] = moving >> j & 1 ? rows.row(index(round, j)) : -1;
    cluster_wait();
#pragma unroll
    for (int j = 0; j < kClusterPieces; ++j)
      if (target[j] >= 0) *reinterpret_cast<uint4*>(cache + target[j] * row_bytes) = own[j * kClusterThreads];
    load();
    ahead = leader;
    locate(round + 2);
    look_up(round + 3);
  }
#else
  refuse_architecture();
#endif
}

// How a launch cuts its work.
struct ClusterPlan {
  int64_t slices = 1;  // of a row's columns
  unsigned cluster = kMaxCluster;
  dim3 block;  // columns of 16 bytes, rows
};

inline ClusterPlan plan_clusters(const KvCompactParams& p, int64_t row_bytes, unsigned max_cluster,
                                 const Device& device) {
  ClusterPlan plan;
  plan.cluster = max_cluster;
  const int64_t heads = 2 * p.cache.num_kv_heads * p.num_sequences;
  const auto blocks = [&] { return heads * plan.slices * plan.cluster; };
  const auto can_halve = [&] { return row_bytes % (32 * plan.slices) == 0 && row_bytes / plan.slices > 64; };
  while (can_halve() && blocks() < 3 * device.num_multiprocessors) plan.slices *= 2;
  plan.block.x = static_cast<unsigned>(row_bytes / plan.slices / 16);
  plan.block.y = kClusterThreads / plan.block.x;
  const auto idle = [&] { return (plan.cluster - 1) * kClusterPieces * plan.block.y >= p.keep_count; };
  while (plan.cluster > 1 && (idle() || blocks() > 16 * device.num_multiprocessors)) plan.cluster /= 2;
  return plan;
}

// Whether rows that are aligned to so many bytes can be moved so.
inline bool compact_sm90_takes(int64_t row_bytes, int aligned_bytes, const Device& device) {
  return device.compute_capability >= 90 && aligned_bytes == 16 && row_bytes <= 16 * kClusterThreads;
}

inline cudaError_t compact_sm90(const KvCompactParams& p, int64_t row_bytes, const Launch& launch) {
  constexpr auto kernel = move_rows_clustered;
  const bool allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess;
  if (!allowed) cudaGetLastError();  // leaves none behind: smaller clusters will do
  const bool large = allowed && resident_clusters<kernel>(kClusterThreads, kMaxCluster, 0, launch.device) > 0;
  const ClusterPlan plan = plan_clusters(p, row_bytes, large ? kMaxCluster : 8, launch.device);
  const dim3 grid(static_cast<unsigned>(plan.slices) * plan.cluster,
                  static_cast<unsigned>(2 * p.cache.num_kv_heads), static_cast<unsigned>(p.num_sequences));
  return launch_clusters(kernel, grid, plan.block, plan.cluster, 0, launch, p,
                         static_cast<uint32_t>(row_bytes));
}

}  // namespace ortolan::cuda
