// Groups the pairs of token and choice by expert, by a stable counting sort, and their inputs.
//
// A block per expert counts the pairs of the experts before its own, which says where its list begins, and
// then writes its list in ascending order. No block waits for another. Experts that do not exist have no
// list.
#include "instances.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/common/warp.cuh"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 1024, kGatherThreads = 256;
constexpr int kAtOnce = 8;  // pairs or pieces that a thread has on their way
constexpr int kWarps = kThreads / 32;

// The sum over the block, in every thread; `sums` [kWarps] is free once all threads have passed the next
// barrier.
__device__ __forceinline__ int block_sum(int value, int* sums) {
  value = fold_lanes<16, 1>(value, Add());
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  return fold_lanes<16, 1>(sums[threadIdx.x % 32], Add());
}

__global__ void __launch_bounds__(kThreads)
    lists_kernel(const int32_t* experts, int num_pairs, ExpertScratch scratch) {
  static_assert(kWarps == 32);
  __shared__ int sums[2][kWarps];
  launch_dependents();
  touch_parameters(scratch);
  wait_for_previous_kernel();
  const auto expert = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x % 32);
  int before = 0, own = 0;
#pragma unroll kAtOnce
  for (int i = threadIdx.x; i < num_pairs; i += kThreads) {
    before += experts[i] >= 0 && experts[i] < expert;
    own += experts[i] == expert;
  }
  before = block_sum(before, sums[0]);
  own = block_sum(own, sums[1]);
  if (threadIdx.x == 0) {
    scratch.offsets[expert] = before;
    if (expert == static_cast<int>(gridDim.x) - 1) scratch.offsets[expert + 1] = before + own;
  }
  if (own == 0) return;
  int place = before;  // of the first pair that is found in this turn
  for (int first = 0; first < num_pairs; first += kAtOnce * kThreads) {
    const int i = first + static_cast<int>(threadIdx.x) * kAtOnce;
    bool is_own[kAtOnce];
    int found = 0;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) found += is_own[n] = i + n < num_pairs && experts[i + n] == expert;
    const int until = inclusive_sum(found, lane);  // found by the lanes up to this one
    __syncthreads();                               // the sums of the last turn have been read
    if (lane == 31) sums[0][threadIdx.x / 32] = until;
    __syncthreads();
    const int warps = inclusive_sum(sums[0][lane], lane);  // found by the warps up to the lane's number
    const int own_warps = __shfl_sync(~0u, warps, threadIdx.x / 32);
    int target = place + own_warps - __shfl_sync(~0u, until, 31) + until - found;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
      if (is_own[n]) scratch.order[target++] = i + n;
    place += __shfl_sync(~0u, warps, 31);
  }
}

// A warp's inputs: those of one pair, in pieces of 16 bytes.
__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const __grid_constant__ ExpertStep p, const __grid_constant__ ExpertScratch scratch,
                  int pieces) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t place = (int64_t{blockIdx.x} * kGatherThreads + threadIdx.x) / 32;
  if (place >= scratch.offsets[p.num_experts]) return;  // what is left has no expert
  const auto* source = static_cast<const uint4*>(p.x) + scratch.order[place] / p.top_k * pieces;
  auto* target = static_cast<uint4*>(scratch.products) + place * pieces;
#pragma unroll kAtOnce
  for (int i = threadIdx.x % 32; i < pieces; i += 32) target[i] = source[i];
}

}  // namespace

cudaError_t launch_gather_inputs(const ExpertStep& p, const ExpertScratch& scratch, const Launch& launch) {
  return launch_overlapped(
      gather_kernel, dim3(static_cast<unsigned>(divide_up(p.num_tokens * p.top_k * 32, kGatherThreads))),
      dim3(kGatherThreads), 0, launch, p, scratch,
      static_cast<int>(p.hidden_size * element_bytes(p.element) / 16));
}

cudaError_t launch_expert_lists(const ExpertStep& p, const ExpertScratch& scratch, const Launch& launch) {
  return launch_overlapped(lists_kernel, dim3(static_cast<unsigned>(p.num_experts)), dim3(kThreads), 0,
                           launch, p.experts, static_cast<int>(p.num_tokens * p.top_k), scratch);
}

}  // namespace ortolan::cuda
