// float32 attention on the CUDA cores, for any number of tokens: exact sums rather than speed.
//
// A block holds 16 query rows of one head, 128 threads, and walks tiles of 32 keys that are cut by position,
// in ascending order. Products: 8 threads per row and 4 keys each. Sums: a thread owns every 128th column of
// all rows. What a row gets depends on its own keys alone.
#include <cuda_runtime.h>

#include "kernels/cuda/attention/prefill/query_tiles.cuh"
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/softmax.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "key_rows.cuh"
#include "key_tiles.cuh"

namespace ortolan::cuda {
namespace {

constexpr int kRows = 16;
constexpr int kKeys = 32;
constexpr int kThreads = 128;
constexpr int kThreadsPerRow = kThreads / kRows;
constexpr int kKeysPerThread = kKeys / kThreadsPerRow;
constexpr int kDotColumns = 32;  // whose products are summed apart: rounding grows with a chain of sums

// Natural logits with the accurate tanh and exponential: float32 callers compare with float64.
__device__ __forceinline__ float logit(const SwaAttentionParams& params, float product) {
  const float z = product * params.scale;
  return params.softcap > 0 ? params.softcap * tanhf(z / params.softcap) : z;
}

template <int kColumnsPerThread>
__global__ void __launch_bounds__(kThreads)
    float32_kernel(const __grid_constant__ SwaAttentionParams params, int tiles, int section_heads) {
  extern __shared__ float shared[];
  __shared__ float weights[kRows][kKeys];
  __shared__ float rescales[kRows];
  const int head_size = static_cast<int>(params.cache.head_size);
  const int stride = head_size + 1;
  float* queries = shared;                         // [kRows, stride]
  float* rows_of_keys = queries + kRows * stride;  // [kKeys, stride]: keys, then values
  wait_for_previous_kernel();
  launch_dependents();

  const TileAndHead block = TileAndHead::of(blockIdx.x, tiles, section_heads);
  const QueryTile tile = find_query_tile(params.packing, block.tile, kRows, {});
  if (tile.sequence < 0) return;
  const int head = block.head;
  const int64_t kv_head = head / (params.num_heads / params.cache.num_kv_heads);
  const int32_t first = static_cast<int32_t>(params.past_len.at(tile.sequence, kv_head)) + tile.offset;
  const int32_t last = first + tile.count - 1;
  const int32_t end = first - tile.offset + static_cast<int32_t>(params.packing.count(tile.sequence));
  const Visibility visibility = Visibility::of(params, tile.sequence, end - 1);
  const SeenPositions seen = visibility.of_queries(first, last);
  const KeyRows rows(params.cache, tile.sequence, kv_head);
  const KeyTiles visits = KeyTiles::of(seen, kKeys);

  const auto* query = static_cast<const float*>(params.query);
  for (int i = threadIdx.x; i < kRows * head_size; i += kThreads) {
    const int row = i / head_size, column = i % head_size;
    queries[row * stride + column] =
        row < tile.count ? query[((tile.first + row) * params.num_heads + head) * head_size + column] : 0;
  }
  const auto load = [&](const void* cache, int32_t first_key) {
    const int32_t slot = rows.first_slot(first_key);
    for (int i = threadIdx.x; i < kKeys * head_size; i += kThreads) {
      const int row = i / head_size, column = i % head_size;
      rows_of_keys[row * stride + column] =
          seen.holds(first_key + row) ? static_cast<const float*>(cache)[rows.offset(slot + row) + column]
                                      : 0;
    }
  };

  const int row = threadIdx.x / kThreadsPerRow;
  const int part = threadIdx.x % kThreadsPerRow;
  const SeenPositions own = visibility.of_query(first + row);
  float maximum = -INFINITY, total = 0;
  float sums[kRows][kColumnsPerThread] = {};
  for (int n = 0; n < visits.count(); ++n) {
    const int32_t first_key = visits.at(n) * kKeys;
    __syncthreads();
    load(params.key_cache, first_key);
    __syncthreads();
    float z[kKeysPerThread] = {};
    for (int begin = 0; begin < head_size; begin += kDotColumns) {
      float sums_of_columns[kKeysPerThread] = {};
      const int end = min(begin + kDotColumns, head_size);
      for (int column = begin; column < end; ++column)
#pragma unroll
        for (int k = 0; k < kKeysPerThread; ++k)
          sums_of_columns[k] =
              fmaf(queries[row * stride + column],
                   rows_of_keys[(k * kThreadsPerRow + part) * stride + column], sums_of_columns[k]);
#pragma unroll
      for (int k = 0; k < kKeysPerThread; ++k) z[k] += sums_of_columns[k];
    }
    float tile_maximum = maximum;
#pragma unroll
    for (int k = 0; k < kKeysPerThread; ++k) {
      const bool sees = own.holds(first_key + k * kThreadsPerRow + part);
      z[k] = sees ? logit(params, z[k]) : -INFINITY;
      tile_maximum = fmaxf(tile_maximum, z[k]);
    }
    tile_maximum = fold_lanes<kThreadsPerRow / 2, 1>(tile_maximum, Max());
    const float base = finite_max(tile_maximum);
    const float rescale = expf(maximum - base);
    float tile_total = 0;
#pragma unroll
    for (int k = 0; k < kKeysPerThread; ++k) {
      const float weight = expf(z[k] - base);
      weights[row][k * kThreadsPerRow + part] = weight;
      tile_total += weight;
    }
    tile_total = fold_lanes<kThreadsPerRow / 2, 1>(tile_total, Add());
    total = fmaf(total, rescale, tile_total);
    maximum = tile_maximum;
    if (part == 0) rescales[row] = rescale;
    __syncthreads();
    load(params.value_cache, first_key);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; ++c) {
      const int column = c * kThreads + threadIdx.x;
      float tile_sums[kRows] = {};  // apart, so that rounding does not grow with every key
#pragma unroll 2                    // for compute capability 8.0 nvcc would unroll all, and spill 25 KB
      for (int k = 0; k < kKeys; ++k) {
        const float value = column < head_size ? rows_of_keys[k * stride + column] : 0;
#pragma unroll
        for (int r = 0; r < kRows; ++r) tile_sums[r] = fmaf(weights[r][k], value, tile_sums[r]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r][c] = fmaf(sums[r][c], rescales[r], tile_sums[r]);
    }
  }

  float base = finite_max(maximum), rescale = 1.0f;
  if (params.sink_logits) {
    base = finite_max(fmaxf(maximum, params.sink_logits[head]));
    rescale = expf(maximum - base);
    total = fmaf(total, rescale, expf(params.sink_logits[head] - base));
  }
  __syncthreads();  // the last tile's factors have been read
  if (part == 0) {
    rescales[row] = total > 0 ? rescale / total : 0.0f;
    if (params.lse && row < tile.count)
      params.lse[head * params.packing.num_tokens + tile.first + row] =
          total > 0 ? base + logf(total) : -INFINITY;
  }
  __syncthreads();
  auto* output = static_cast<float*>(params.output);
#pragma unroll
  for (int c = 0; c < kColumnsPerThread; ++c) {
    const int column = c * kThreads + threadIdx.x;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (column < head_size && r < tile.count)
        output[((tile.first + r) * params.num_heads + head) * head_size + column] = sums[r][c] * rescales[r];
  }
}

}  // namespace

cudaError_t attention_float32(const SwaAttentionParams& params, const Launch& launch) {
  const int64_t head_size = params.cache.head_size;
  const auto shared_bytes = static_cast<int>((kRows + kKeys) * (head_size + 1) * sizeof(float));
  const int64_t tiles = max_query_tiles(params.packing, kRows, {});
  const auto enqueue = [&]<int kColumnsPerThread>() {
    constexpr auto kKernel = float32_kernel<kColumnsPerThread>;
    const cudaError_t error = allow_shared_memory<kKernel>(launch.device);
    if (error != cudaSuccess) return error;
    return launch_overlapped(kKernel, dim3(static_cast<unsigned>(tiles * params.num_heads)), dim3(kThreads),
                             shared_bytes, launch, params, static_cast<int>(tiles),
                             static_cast<int>(heads_per_section(params)));
  };
  if (head_size <= 128) return enqueue.operator()<1>();
  return head_size <= 256 ? enqueue.operator()<2>() : enqueue.operator()<4>();
}

}  // namespace ortolan::cuda
