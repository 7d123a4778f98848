// Moves the scales of kept rows to the front of their head's cache, in place; KvCompact moves the codes.
//
// Grid: (K or V, kv head, sequence). Kept positions are ascending, so a round reads nothing that earlier
// rounds wrote, and its own reads lie before its barrier (see copies/compact.cu).
#include "caches.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/copies/compact_rows.cuh"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads) compact_scales_kernel(const KvCompactParams p) {
  const CompactRows rows(p, blockIdx.z, blockIdx.y);
  float* scales = blockIdx.x ? p.value_scale : p.key_scale;
  bool ended = false;
  for (int64_t first = 0; !ended; first += kThreads) {
    const int64_t k = first + threadIdx.x;
    const int32_t kept = rows.kept(k);
    const int64_t source = kept > k ? rows.row(kept) : -1;
    const int64_t target = source < 0 ? -1 : rows.row(k);
    const float scale = target < 0 ? 0.0f : scales[source];
    ended = __syncthreads_or(kept < 0);
    if (target >= 0) scales[target] = scale;
  }
}

}  // namespace

cudaError_t compact_scales(const KvCompactParams& p, const Launch& launch) {
  if (!is_code(p.cache_element) || p.num_sequences == 0 || p.keep_count == 0) return cudaSuccess;
  const dim3 grid(2, static_cast<unsigned>(p.cache.num_kv_heads), static_cast<unsigned>(p.num_sequences));
  return launch_alone(compact_scales_kernel, grid, dim3(kThreads), launch.stream, p);
}

}  // namespace ortolan::cuda
