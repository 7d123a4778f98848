// KvSelect on CUDA: a block per list finds the rank of the last position that fits, then writes positions in
// order.
//
// The rank is found in rounds. A round counts, in 2048 bins, the ranks of the interval in which it must lie;
// the bin at which the counts from above reach the budget is the next interval. The first interval is that of
// the ranks there are, so that scores which are alike spread over the bins. Counts are integers in shared
// memory, so equal runs give equal lists. Ranks stay in registers where the capacity allows. Grid: one block
// per list.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "kernels/cuda/operators.generated.h"
#include "kernels/selection.h"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;
constexpr int kTile = 4 * kThreads;  // positions that a block takes at a time, four a thread
constexpr int kHeldTiles = 8;        // whose ranks registers hold
static_assert(kBins == 2 * kThreads);

struct SelectBlock {
  int histogram[kBins];
  int warp_sums[kThreads / 32];
  uint32_t least, largest;  // ranks that neither are never kept nor always
  int bin;
  int above;  // positions in higher bins
  int inside;
};

// The sum over the threads before this one; `total` is that over all.
__device__ __forceinline__ int scan(SelectBlock& block, int value, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sum = inclusive_sum(value, lane);
  if (lane == 31) block.warp_sums[warp] = sum;
  __syncthreads();
  const int warp_sums = inclusive_sum(block.warp_sums[lane], lane);
  total = __shfl_sync(~0u, warp_sums, 31);
  const int before_warp = warp == 0 ? 0 : __shfl_sync(~0u, warp_sums, warp - 1);
  __syncthreads();  // the sums may be written again
  return before_warp + sum - value;
}

// The ranks of a list's positions, four adjacent ones of a tile per thread; kTiles 0: not held.
template <int kTiles>
struct Ranks {
  const Selection& selection;
  uint32_t held[kTiles ? kTiles : 1][4];

  __device__ __forceinline__ void read(uint32_t (&ranks)[4], int64_t begin) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) ranks[i] = selection.rank(begin + threadIdx.x * 4 + i);
  }
  __device__ __forceinline__ explicit Ranks(const Selection& selection) : selection(selection) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      if (tile * kTile < selection.length) read(held[tile], tile * kTile);
  }
  // Calls `body(begin, ranks)` for each tile; all threads of the block take part.
  template <typename Body>
  __device__ __forceinline__ void for_each_tile(Body&& body) const {
    if constexpr (kTiles > 0) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        if (tile * kTile < selection.length) body(int64_t{tile} * kTile, held[tile]);
    } else {
#pragma unroll 1
      for (int64_t begin = 0; begin < selection.length; begin += kTile) {
        uint32_t ranks[4];
        read(ranks, begin);
        body(begin, ranks);
      }
    }
  }
  template <typename Body>
  __device__ __forceinline__ void for_each(Body&& body) const {
    for_each_tile([&](int64_t, const uint32_t (&ranks)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) body(ranks[i]);
    });
  }
};

// What is kept: ranks above `lowest`, and the first `equals` of those that equal it.
struct Threshold {
  uint32_t lowest;
  int equals;
};

// Finds the bin at which the counts from above reach `left`; false where they do not.
__device__ __forceinline__ bool find_bin(SelectBlock& block, int left) {
  __syncthreads();
  const int bin = kBins - 1 - 2 * static_cast<int>(threadIdx.x);
  const int first = block.histogram[bin], second = block.histogram[bin - 1];
  int total;
  const int above = scan(block, first + second, total);
  if (total < left) return false;
  if (above < left && left <= above + first + second) {
    const bool is_first = left <= above + first;
    block.bin = is_first ? bin : bin - 1;
    block.above = is_first ? above : above + first;
    block.inside = is_first ? first : second;
  }
  __syncthreads();
  return true;
}

template <int kTiles>
__device__ __forceinline__ Threshold find_threshold(SelectBlock& block, const Ranks<kTiles>& ranks,
                                                    int left) {
  const auto clear = [&] {
    for (int i = threadIdx.x; i < kBins; i += kThreads) block.histogram[i] = 0;
  };
  if (threadIdx.x == 0) {
    block.least = kAlwaysKept;
    block.largest = 0;
  }
  clear();
  __syncthreads();
  uint32_t least = kAlwaysKept, largest = 0;
  ranks.for_each([&](uint32_t rank) {
    if (rank == kNeverKept || rank == kAlwaysKept) return;
    least = min(least, rank);
    largest = max(largest, rank);
  });
  least = __reduce_min_sync(~0u, least);
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0 && largest > 0) {
    atomicMin(&block.least, least);
    atomicMax(&block.largest, largest);
  }
  __syncthreads();
  uint32_t begin = block.least;
  const uint32_t width = block.largest > begin ? block.largest - begin : 0;
  int shift = max(32 - __clz(width) - kBinBits, 0);
  if (width >> shift > kBins - 2) ++shift;  // the highest bin is that of positions that are always kept
  ranks.for_each([&](uint32_t rank) {
    if (rank == kNeverKept) return;
    const uint32_t bin = rank == kAlwaysKept ? kBins - 1 : (rank - begin) >> shift;
    atomicAdd(&block.histogram[bin], 1);
  });
  if (!find_bin(block, left)) return {kNeverKept, 0};  // all that may be kept are
  if (block.bin == kBins - 1) return {kAlwaysKept, left};
  for (;;) {
    begin += static_cast<uint32_t>(block.bin) << shift;
    left -= block.above;
    if (left == block.inside) return {begin - 1, 0};
    if (shift == 0) return {begin, left};
    const int inner = max(shift - kBinBits, 0);
    clear();
    __syncthreads();
    ranks.for_each([&](uint32_t rank) {
      const uint32_t above = rank - begin;
      if (rank >= begin && above >> shift == 0) atomicAdd(&block.histogram[above >> inner], 1);
    });
    shift = inner;
    find_bin(block, left);
  }
}

template <int kTiles>
__global__ void __launch_bounds__(kThreads) kv_select_kernel(const __grid_constant__ KvSelectParams p) {
  __shared__ SelectBlock block;
  wait_for_previous_kernel();
  const Selection selection = Selection::of(p, blockIdx.x);
  const Ranks<kTiles> ranks(selection);
  Threshold threshold{kAlwaysKept, 0};
  if (p.keep_count > 0) threshold = find_threshold(block, ranks, static_cast<int>(p.keep_count));

  int32_t* keep = p.keep + blockIdx.x * p.keep_count;
  int kept_above = 0, kept_equal = 0;
  ranks.for_each_tile([&](int64_t begin, const uint32_t (&tile)[4]) {
    int counts = 0;  // above in the low half, equal in the high half
#pragma unroll
    for (int i = 0; i < 4; ++i)
      counts += tile[i] > threshold.lowest ? 1 : tile[i] == threshold.lowest ? 1 << 16 : 0;
    int total;
    const int before = scan(block, counts, total);
    int above = kept_above + (before & 0xffff), equal = kept_equal + (before >> 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_above = tile[i] > threshold.lowest, is_equal = tile[i] == threshold.lowest;
      if (is_above || (is_equal && equal < threshold.equals))
        keep[above + min(equal, threshold.equals)] = static_cast<int32_t>(begin + threadIdx.x * 4 + i);
      above += is_above;
      equal += is_equal;
    }
    kept_above += total & 0xffff;
    kept_equal += total >> 16;
  });
  const int kept = kept_above + min(kept_equal, threshold.equals);
  for (int64_t i = kept + threadIdx.x; i < p.keep_count; i += kThreads) keep[i] = -1;
  const auto heads = static_cast<int>(p.num_lists == 1 ? p.num_kv_heads : 1);
  for (int head = threadIdx.x; head < heads; head += kThreads)
    p.kept_len[int64_t{blockIdx.x} * heads + head] = kept;
}

}  // namespace

cudaError_t kv_select(const KvSelectParams& params, const Launch& launch) {
  const int64_t lists = params.num_sequences * params.num_lists;
  if (lists == 0) return cudaSuccess;
  const auto kernel =
      params.capacity <= kHeldTiles * kTile ? kv_select_kernel<kHeldTiles> : kv_select_kernel<0>;
  return launch_overlapped(kernel, dim3(static_cast<unsigned>(lists)), dim3(kThreads), 0, launch, params);
}

}  // namespace ortolan::cuda
