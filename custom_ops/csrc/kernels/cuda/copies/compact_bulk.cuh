// KvCompact of short lists from sm_90 on: the copy engine moves whole rows through shared memory.
//
// Grid: one cluster of blocks per (kv head and K or V, sequence). The kept rows are cut into rounds, a round
// into one tile per block, and every thread owns one row of its block's tiles. A block starts all its loads
// at once, and stores a tile once the whole cluster has loaded that round: 32 rows at once where their
// targets are adjacent. Why that is safe in place stands in compact_sm90.cuh. The engine takes longer to
// start a row than to copy it: it is the faster way while all rows are in flight at once, not where rows keep
// coming.
#pragma once

#include <algorithm>

#include "compact_rows.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/wgmma.cuh"

namespace ortolan::cuda {

constexpr int kBulkRounds = 2;
constexpr int kBulkThreads = 256;
constexpr int kBulkTileBytes = 32 << 10;
constexpr int kBulkCluster = 8;

// Stores the rows of a warp, each to a row of the pool, or not at all where that is negative.
__device__ __forceinline__ void store_rows(char* cache, int64_t target, uint32_t shared, uint32_t row_bytes) {
  const int lane = threadIdx.x % 32;
  const int64_t base = __shfl_sync(~0u, target, 0);
  if (__all_sync(~0u, base >= 0 && target == base + lane)) {
    if (lane == 0) bulk_store(cache + target * row_bytes, shared, 32 * row_bytes);
  } else if (target >= 0) {
    bulk_store(cache + target * row_bytes, shared, row_bytes);
  }
  bulk_commit();
}

__global__ void __launch_bounds__(kBulkThreads) move_rows_bulk(const KvCompactParams p, uint32_t row_bytes) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char tiles[];
  __shared__ Barrier full[kBulkRounds];
  launch_dependents();
  if (threadIdx.x == 0)
    for (Barrier& barrier : full) barrier.init(blockDim.x / 32);
  fence_async_proxy();
  __syncthreads();
  wait_for_previous_kernel();
  const CompactRows rows(p, blockIdx.z, blockIdx.y >> 1);
  char* cache = static_cast<char*>(blockIdx.y & 1 ? p.value_cache : p.key_cache);
  const int64_t step = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
  const auto place = [&](int round) {
    return shared_address(tiles) + (round * blockDim.x + threadIdx.x) * row_bytes;
  };
  int32_t kept[kBulkRounds];
  bool moves[kBulkRounds];
#pragma unroll
  for (int round = 0; round < kBulkRounds; ++round) kept[round] = rows.kept(round * step + first);
#pragma unroll
  for (int round = 0; round < kBulkRounds; ++round) {
    const int64_t source = kept[round] == round * step + first ? -1 : rows.row(kept[round]);
    moves[round] = source >= 0;
    const int count = __popc(__ballot_sync(~0u, moves[round]));
    if (threadIdx.x % 32 == 0) full[round].arrive_expecting(count * row_bytes);
    __syncwarp();
    if (moves[round]) bulk_load(place(round), cache + source * row_bytes, row_bytes, full[round]);
  }
#pragma unroll
  for (int round = 0; round < kBulkRounds; ++round) {
    const int64_t target = moves[round] ? rows.row(round * step + first) : -1;
    full[round].wait(0);
    cluster_arrive();
    cluster_wait();
    store_rows(cache, target, place(round), row_bytes);
  }
  bulk_wait_written();
#else
  refuse_architecture();
#endif
}

inline unsigned bulk_threads(int64_t row_bytes) {
  return static_cast<unsigned>(std::clamp<int64_t>(kBulkTileBytes / row_bytes / 32 * 32, 32, kBulkThreads));
}

// Whether rows that are aligned to so many bytes can be moved so in kBulkRounds, by most of the device.
inline bool compact_bulk_takes(const KvCompactParams& p, int64_t row_bytes, int aligned_bytes,
                               const Device& device) {
  const bool can = device.compute_capability >= 90 && aligned_bytes == 16 &&
                   32 * row_bytes <= kBulkTileBytes && row_bytes >= 128;
  const int64_t blocks = kBulkCluster * 2 * p.cache.num_kv_heads * p.num_sequences;
  return can && 4 * blocks >= 3 * device.num_multiprocessors &&
         p.keep_count <= kBulkRounds * kBulkCluster * bulk_threads(row_bytes);
}

inline cudaError_t compact_bulk(const KvCompactParams& p, int64_t row_bytes, const Launch& launch) {
  const unsigned threads = bulk_threads(row_bytes);
  unsigned cluster = kBulkCluster;
  while (cluster > 1 && (cluster - 1) * threads >= p.keep_count) cluster /= 2;
  const dim3 grid(cluster, static_cast<unsigned>(2 * p.cache.num_kv_heads),
                  static_cast<unsigned>(p.num_sequences));
  const size_t shared_bytes = kBulkRounds * threads * row_bytes;
  const cudaError_t error = allow_shared_memory<move_rows_bulk>(launch.device);
  if (error != cudaSuccess) return error;
  return launch_clusters(move_rows_bulk, grid, threads, cluster, shared_bytes, launch, p,
                         static_cast<uint32_t>(row_bytes));
}

}  // namespace ortolan::cuda
