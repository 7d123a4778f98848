// RingKvAppend into caches of codes on CUDA: a warp turns one row of a key or a value into codes and a scale.
//
// Grid: x walks (packed row, kv head, K or V), eight warps a block. A warp reads its row twice, the second
// time from the cache. Of the rows of a chunk that share a slot only the last is written, as in the dense
// append.
#include "caches.h"
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/packed_rows.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/row_scale.h"

namespace ortolan::cuda {
namespace {

constexpr int kWarps = 8;

template <typename Element>
__global__ void __launch_bounds__(32 * kWarps) append_codes_kernel(const RingKvAppendParams p, int64_t rows) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t warp = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (warp >= rows) return;
  const int lane = threadIdx.x % 32, size = static_cast<int>(p.cache.head_size);
  const bool is_value = warp % 2;
  const int64_t row = warp / 2, head = row % p.cache.num_kv_heads;
  const int64_t target = append_row(p.cache, p.packing, p.past_len, row / p.cache.num_kv_heads, head);
  if (target < 0) return;
  const Element* source = static_cast<const Element*>(is_value ? p.value : p.key) + row * size;
  float largest = 0;
  bool is_nan = false;
  for (int d = lane; d < size; d += 32) {
    const float magnitude = fabsf(to_float(source[d]));
    is_nan |= magnitude != magnitude;
    largest = fmaxf(largest, magnitude);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  is_nan = __any_sync(0xffffffffu, is_nan);
  const RowScale scale = RowScale::of(p.cache_element, largest, is_nan);
  uint8_t* codes = static_cast<uint8_t*>(is_value ? p.value_cache : p.key_cache) + target * size;
  for (int d = lane; d < size; d += 32) codes[d] = scale.code(to_float(source[d]));
  float* scales = is_value ? p.value_scale : p.key_scale;
  if (lane == 0) scales[target] = scale.value;
}

}  // namespace

cudaError_t append_codes(const RingKvAppendParams& p, const Launch& launch) {
  const int64_t rows = 2 * p.packing.num_tokens * p.cache.num_kv_heads;
  if (rows == 0 || p.packing.num_sequences == 0 || p.cache.head_size == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((rows + kWarps - 1) / kWarps));
  return with_element(p.element, [&]<typename Element>() {
    return launch_overlapped(append_codes_kernel<Element>, grid, dim3(32 * kWarps), 0, launch, p, rows);
  });
}

}  // namespace ortolan::cuda
