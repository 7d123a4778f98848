// KvSelect on CUDA: a block per list finds the rank of the last position that fits, then writes positions in
// order.
//
// The rank is found from its highest digit to its lowest: a histogram of the digit over the positions whose
// higher digits are those found so far, then the digit at which the counts from above reach the budget.
// Histograms are integers in shared memory, so equal runs give equal lists. Any C; grid: one block per list.
#include "../selection.h"
#include "launch.cuh"
#include "ptx.cuh"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kBins = 2 * kThreads;
constexpr int kTile = 4 * kThreads;  // positions between two scans
constexpr int kDigits = 3;

struct SelectBlock {
  int histogram[kBins];
  int warp_sums[kThreads / 32];
  uint32_t digit;
  int left;
};

// The sum over the threads before this one; `total` is that over all.
__device__ __forceinline__ int scan(SelectBlock& block, int value, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == 31) block.warp_sums[warp] = sum;
  __syncthreads();
  int warp_sum = block.warp_sums[lane];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(~0u, warp_sum, step);
    if (lane >= step) warp_sum += before;
  }
  total = __shfl_sync(~0u, warp_sum, 31);
  const int before_warp = warp == 0 ? 0 : __shfl_sync(~0u, warp_sum, warp - 1);
  __syncthreads();  // the sums may be written again
  return before_warp + sum - value;
}

// Finds the digit under the higher digits `prefix` at which `left` positions are reached from above, and what
// is left of them; where there are fewer in all, leaves `left` as it was and returns false.
__device__ bool find_digit(SelectBlock& block, const Selection& selection, int shift, int width,
                           uint32_t& prefix, int& left) {
  for (int i = threadIdx.x; i < kBins; i += kThreads) block.histogram[i] = 0;
  __syncthreads();
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < selection.length; i += kThreads) {
    const uint32_t rank = selection.rank(i);
    if (rank != kNeverKept && (shift + width == 32 || rank >> (shift + width) == prefix))
      atomicAdd(&block.histogram[rank >> shift & ((1u << width) - 1)], 1);
  }
  __syncthreads();
  const int highest = kBins - 1 - 2 * static_cast<int>(threadIdx.x);
  const int first = block.histogram[highest], second = block.histogram[highest - 1];
  int total;
  const int above = scan(block, first + second, total);
  if (total < left) return false;
  if (above < left && left <= above + first + second) {
    const bool is_first = left <= above + first;
    block.digit = is_first ? highest : highest - 1;
    block.left = left - above - (is_first ? 0 : first);
  }
  __syncthreads();
  prefix = prefix << width | block.digit;
  left = block.left;
  return true;
}

__global__ void __launch_bounds__(kThreads) kv_select_kernel(const __grid_constant__ KvSelectParams p) {
  __shared__ SelectBlock block;
  wait_for_previous_kernel();
  const Selection selection = Selection::of(p, blockIdx.x);
  uint32_t lowest = 0;  // kept ranks lie above it, and the first `equals` of those that are equal
  int equals = static_cast<int>(p.keep_count);
  constexpr int kWidths[kDigits] = {11, 11, 10};
  bool found = p.keep_count > 0;
#pragma unroll 1
  for (int digit = 0, shift = 32; digit < kDigits && found; ++digit) {
    shift -= kWidths[digit];
    found = find_digit(block, selection, shift, kWidths[digit], lowest, equals);
  }
  if (!found) equals = 0;  // all that may be kept are

  int32_t* keep = p.keep + blockIdx.x * p.keep_count;
  int kept_above = 0, kept_equal = 0;
  for (int64_t begin = 0; begin < selection.length && p.keep_count > 0; begin += kTile) {
    const int64_t first = begin + threadIdx.x * 4;
    uint32_t ranks[4];
    int counts = 0;  // above in the low half, equal in the high half
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ranks[i] = selection.rank(first + i);
      counts += ranks[i] > lowest ? 1 : ranks[i] == lowest ? 1 << 16 : 0;
    }
    int total;
    const int before = scan(block, counts, total);
    int above = kept_above + (before & 0xffff), equal = kept_equal + (before >> 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_above = ranks[i] > lowest, is_equal = ranks[i] == lowest;
      if (is_above || (is_equal && equal < equals))
        keep[above + min(equal, equals)] = static_cast<int32_t>(first + i);
      above += is_above;
      equal += is_equal;
    }
    kept_above += total & 0xffff;
    kept_equal += total >> 16;
  }
  const int kept = kept_above + min(kept_equal, equals);
  for (int64_t i = kept + threadIdx.x; i < p.keep_count; i += kThreads) keep[i] = -1;
  const auto heads = static_cast<int>(p.num_lists == 1 ? p.num_kv_heads : 1);
  for (int head = threadIdx.x; head < heads; head += kThreads)
    p.kept_len[int64_t{blockIdx.x} * heads + head] = kept;
}

}  // namespace

cudaError_t kv_select(const KvSelectParams& params, const Launch& launch) {
  const int64_t lists = params.num_sequences * params.num_lists;
  if (lists == 0) return cudaSuccess;
  return launch_overlapped(kv_select_kernel, dim3(static_cast<unsigned>(lists)), dim3(kThreads), 0, launch,
                           params);
}

}  // namespace ortolan::cuda
