// NarrowStep: which wanted rows each sequence owns, how long its cache is before them, and their positions.
//
// Grid: a block for each edge between sequences. It counts the wanted rows before its edge and before the
// next one, kThreads indices at a time; sums are of integers, so their order does not matter. Positions are
// dealt out to all threads. Its launch overlaps those of its neighbours.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 128;

// Wanted rows before `edge`, and at most so many; every thread of the block gets the count.
__device__ __forceinline__ int32_t wanted_before(const NarrowStepParams& p, int32_t edge) {
  int32_t count = 0;
  for (int64_t begin = 0; begin < p.num_indices; begin += kThreads) {
    const int64_t r = begin + threadIdx.x;
    count += __syncthreads_count(r < p.num_indices && p.row_indices[r] < edge);
  }
  return min(count, edge);
}

__global__ void __launch_bounds__(kThreads) narrow_step_kernel(const NarrowStepParams p) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t b = blockIdx.x;
  const int32_t first = p.query_start[b], start = wanted_before(p, first);
  if (threadIdx.x == 0) p.query_start_out[b] = start;
  if (b < p.num_sequences) {
    const int32_t end = p.query_start[b + 1];
    const int32_t dropped = (end - first) - (wanted_before(p, end) - start);
    for (int64_t i = b * p.lengths + threadIdx.x; i < (b + 1) * p.lengths; i += kThreads)
      p.past_len_out[i] = p.past_len[i] + dropped;
  }
  if (!p.positions) return;
  for (int64_t r = b * kThreads + threadIdx.x; r < p.num_indices; r += int64_t{gridDim.x} * kThreads)
    p.positions_out[r] = p.position(r);
}

}  // namespace

cudaError_t narrow_step(const NarrowStepParams& p, const Launch& launch) {
  return launch_overlapped(narrow_step_kernel, dim3(static_cast<unsigned>(p.num_sequences + 1)),
                           dim3(kThreads), 0, launch, p);
}

}  // namespace ortolan::cuda
