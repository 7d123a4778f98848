// Prefill attention on tensor cores by mma.sync, for sm_80 and later.
//
// A block holds a tile of queries of one head: 4 warps of 16 or 32 rows (D = 512: two warps share 16 rows and
// halve the columns of the values). Key tiles are cut by position and taken in ascending order; tiles outside
// window and sinks are skipped. Values load while queries meet keys, the next keys while values are summed.
// Rows of the cache that no query of the tile sees arrive as zeros: they may hold anything. A row's sums do
// not depend on the other rows or on tiles that it does not see, so equal queries give equal bits however a
// prompt is cut. Shared rows are padded by 16 bytes, which spreads the eight rows of a matrix load over all
// banks. Source of the schedule: Dao, FlashAttention-2 (arXiv 2307.08691).
#pragma once

#include "kernels/cuda/attention/instances.h"
#include "kernels/cuda/attention/key_rows.cuh"
#include "kernels/cuda/attention/key_tiles.cuh"
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/softmax.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "query_tiles.cuh"

namespace ortolan::cuda {

template <int kHeadSize>
struct MmaShape {
  static constexpr int kThreads = 128;
  static constexpr int kKeys =
      kHeadSize == 64 || kHeadSize == 128 || kHeadSize == 192 ? 64 : 32;  // as registers allow
  static constexpr int kRowTiles = kHeadSize <= 128 ? 2 : 1;              // of 16 rows, per warp
  static constexpr int kColumnWarps = kHeadSize <= 256 ? 1 : 2;
  static constexpr int kRows = kThreads / 32 / kColumnWarps * kRowTiles * 16;
  static constexpr int kColumns = kHeadSize / kColumnWarps;  // of the values, per warp
  static constexpr int kStride = kHeadSize + 8;              // elements
  static constexpr int kSharedBytes = (kRows + 2 * kKeys) * kStride * 2;
};

template <typename Element, int kHeadSize>
struct MmaPrefill {
  using Shape = MmaShape<kHeadSize>;
  static constexpr int kChunks = kHeadSize / 8;  // 16-byte pieces of a row
  static constexpr int kKeyTiles = Shape::kKeys / 8;
  static constexpr int kColumnTiles = Shape::kColumns / 8;

  const SwaAttentionParams& params;
  Element* shared;
  KeyRows rows;
  Visibility visibility;
  Logits logits;
  SeenPositions seen;
  int32_t warp_row;  // first row of the warp
  int lane = threadIdx.x % 32;

  float sums[Shape::kRowTiles][kColumnTiles][4] = {};
  float maxima[Shape::kRowTiles][2];
  float totals[Shape::kRowTiles][2] = {};

  __device__ __forceinline__ Element* keys() const { return shared + Shape::kRows * Shape::kStride; }
  __device__ __forceinline__ Element* values() const { return keys() + Shape::kKeys * Shape::kStride; }

  __device__ __forceinline__ void load_queries(const QueryTile& tile, int head) const {
    const auto* query = static_cast<const Element*>(params.query);
    for (int i = threadIdx.x; i < Shape::kRows * kChunks; i += Shape::kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const bool valid = row < tile.count && chunk * 8 < params.cache.head_size;
      const int64_t source =
          valid ? ((tile.first + row) * params.num_heads + head) * params.cache.head_size + chunk * 8 : 0;
      copy_async_16(shared + row * Shape::kStride + chunk * 8, query + source, valid);
    }
  }

  __device__ __forceinline__ void load_keys(Element* target, const void* cache, int32_t first) const {
    KeyTileCopy<kHeadSize, Shape::kKeys, Shape::kStride, Shape::kThreads>(rows, seen, first)
        .start(target, cache, threadIdx.x);
  }

  // Products of the warp's queries with all keys of the tile.
  __device__ __forceinline__ void multiply_keys(float (&z)[Shape::kRowTiles][kKeyTiles][4]) const {
    const uint32_t query_address =
        shared_address(shared + (warp_row + lane % 16) * Shape::kStride + lane / 16 * 8);
    const uint32_t key_address =
        shared_address(keys() + (lane / 16 * 8 + lane % 8) * Shape::kStride + lane / 8 % 2 * 8);
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; ++k) {
      uint32_t query[Shape::kRowTiles][4];
#pragma unroll
      for (int r = 0; r < Shape::kRowTiles; ++r)
        load_matrix_x4(query[r], query_address + (r * 16 * Shape::kStride + k * 16) * 2);
#pragma unroll
      for (int n = 0; n < kKeyTiles / 2; ++n) {
        uint32_t key[4];
        load_matrix_x4(key, key_address + (n * 16 * Shape::kStride + k * 16) * 2);
#pragma unroll
        for (int r = 0; r < Shape::kRowTiles; ++r) {
          Half<Element>::multiply_add(z[r][2 * n], query[r], key[0], key[1]);
          Half<Element>::multiply_add(z[r][2 * n + 1], query[r], key[2], key[3]);
        }
      }
    }
  }

  // Hides what a query does not see; `first_query` is the position of the warp's first row.
  __device__ __forceinline__ void mask(float (&z)[Shape::kRowTiles][kKeyTiles][4], int32_t first_key,
                                       int32_t first_query) const {
#pragma unroll
    for (int r = 0; r < 2 * Shape::kRowTiles; ++r) {
      const SeenPositions own = visibility.of_query(first_query + r * 8 + lane / 4);
#pragma unroll
      for (int n = 0; n < 2 * kKeyTiles; ++n) {
        const int32_t key = first_key + n / 2 * 8 + lane % 4 * 2 + n % 2;
        if (!own.holds(key)) z[r / 2][n / 2][r % 2 * 2 + n % 2] = -INFINITY;
      }
    }
  }

  // Turns logits into exponentials, and rescales what was summed before.
  __device__ __forceinline__ void exponentiate(float (&z)[Shape::kRowTiles][kKeyTiles][4]) {
    float rescale[Shape::kRowTiles][2];
    bool is_kept = true;
#pragma unroll
    for (int r = 0; r < Shape::kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float maximum = maxima[r][half];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
          maximum = fmaxf(maximum, fmaxf(z[r][n][2 * half], z[r][n][2 * half + 1]));
        maximum = quad_max(maximum);
        const float base = __fmul_rn(finite_max(maximum), logits.factor);
        // Rounded before it is subtracted: where the maximum stays, the factor is exactly 1.
        rescale[r][half] = fast_exp2(__fmul_rn(maxima[r][half], logits.factor) - base);
        is_kept = is_kept && rescale[r][half] == 1;
        maxima[r][half] = maximum;
        float total = 0;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            z[r][n][e] = fast_exp2(fmaf(z[r][n][e], logits.factor, -base));
            total += z[r][n][e];
          }
        totals[r][half] = fmaf(totals[r][half], rescale[r][half], total);
      }
    if (__all_sync(~0u, is_kept)) return;
#pragma unroll
    for (int r = 0; r < Shape::kRowTiles; ++r)
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[r][n][e] *= rescale[r][e / 2];
  }

  __device__ __forceinline__ void multiply_values(const float (&p)[Shape::kRowTiles][kKeyTiles][4],
                                                  int first_column) {
    const uint32_t value_address =
        shared_address(values() + (lane % 16) * Shape::kStride + first_column + lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < kKeyTiles / 2; ++k) {
      uint32_t weights[Shape::kRowTiles][4];
#pragma unroll
      for (int r = 0; r < Shape::kRowTiles; ++r)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          weights[r][e] =
              Half<Element>::pack(p[r][2 * k + e / 2][e % 2 * 2], p[r][2 * k + e / 2][e % 2 * 2 + 1]);
#pragma unroll
      for (int n = 0; n < kColumnTiles / 2; ++n) {
        uint32_t value[4];
        load_matrix_x4_transposed(value, value_address + (k * 16 * Shape::kStride + n * 16) * 2);
#pragma unroll
        for (int r = 0; r < Shape::kRowTiles; ++r) {
          Half<Element>::multiply_add(sums[r][2 * n], weights[r], value[0], value[1]);
          Half<Element>::multiply_add(sums[r][2 * n + 1], weights[r], value[2], value[3]);
        }
      }
    }
  }

  // Divides, and leaves the warp's rows in shared memory where the queries were; writes the LSE.
  __device__ __forceinline__ void finish(const QueryTile& tile, int head, int first_column) {
#pragma unroll
    for (int r = 0; r < Shape::kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float total = quad_sum(totals[r][half]);
        const int row = warp_row + r * 16 + lane / 4 + half * 8;
        const Denominator denominator =
            Denominator::of(total, __fmul_rn(maxima[r][half], logits.factor), params.sink_logits, head);
        const float inverse = denominator.inverse;
        if (params.lse && lane % 4 == 0 && first_column == 0 && row < tile.count)
          params.lse[head * params.packing.num_tokens + tile.first + row] = denominator.lse;
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
          *reinterpret_cast<uint32_t*>(shared + row * Shape::kStride + first_column + n * 8 + lane % 4 * 2) =
              Half<Element>::pack(sums[r][n][2 * half] * inverse, sums[r][n][2 * half + 1] * inverse);
      }
  }

  __device__ __forceinline__ void store(const QueryTile& tile, int head) const {
    auto* output = static_cast<Element*>(params.output);
    const int chunks = static_cast<int>(params.cache.head_size) / 8;
    for (int i = threadIdx.x; i < tile.count * chunks; i += Shape::kThreads) {
      const int row = i / chunks, chunk = i % chunks;
      const int64_t target =
          ((tile.first + row) * params.num_heads + head) * params.cache.head_size + chunk * 8;
      *reinterpret_cast<uint4*>(output + target) =
          *reinterpret_cast<const uint4*>(shared + row * Shape::kStride + chunk * 8);
    }
  }
};

template <typename Element, int kHeadSize>
__global__ void __launch_bounds__(128, 2)
    mma_prefill_kernel(const __grid_constant__ SwaAttentionParams params, int tiles, int section_heads,
                       int most_decode) {
  using Shape = MmaShape<kHeadSize>;
  using Prefill = MmaPrefill<Element, kHeadSize>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_for_previous_kernel();
  launch_dependents();
  const TileAndHead block = TileAndHead::of(blockIdx.x, tiles, section_heads);
  const int head = block.head;
  const QueryTile tile = find_query_tile(params.packing, block.tile, Shape::kRows, {most_decode});
  if (tile.sequence < 0) return;

  const int64_t kv_head = head / (params.num_heads / params.cache.num_kv_heads);
  const int32_t first = static_cast<int32_t>(params.past_len.at(tile.sequence, kv_head)) + tile.offset;
  const int32_t last = first + tile.count - 1;
  const int32_t end = first - tile.offset + static_cast<int32_t>(params.packing.count(tile.sequence));
  const Visibility visibility = Visibility::of(params, tile.sequence, end - 1);
  const SeenPositions seen = visibility.of_queries(first, last), of_each = visibility.of_each(first, last);
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / Shape::kColumnWarps * Shape::kRowTiles * 16;
  const int first_column = warp % Shape::kColumnWarps * Shape::kColumns;
  const KeyTiles visits = KeyTiles::of(seen, Shape::kKeys);
  Prefill prefill{.params = params,
                  .shared = reinterpret_cast<Element*>(shared_memory),
                  .rows = KeyRows(params.cache, tile.sequence, kv_head),
                  .visibility = visibility,
                  .logits = Logits::of(params.scale, params.softcap),
                  .seen = seen,
                  .warp_row = warp_row};
#pragma unroll
  for (int r = 0; r < Shape::kRowTiles; ++r) prefill.maxima[r][0] = prefill.maxima[r][1] = -INFINITY;

  prefill.load_queries(tile, head);
  if (visits.count()) prefill.load_keys(prefill.keys(), params.key_cache, visits.at(0) * Shape::kKeys);
  copy_async_commit();
  for (int n = 0; n < visits.count(); ++n) {
    const int32_t first_key = visits.at(n) * Shape::kKeys;
    copy_async_wait<0>();
    __syncthreads();
    prefill.load_keys(prefill.values(), params.value_cache, first_key);
    copy_async_commit();
    float z[Shape::kRowTiles][Prefill::kKeyTiles][4] = {};
    prefill.multiply_keys(z);
    copy_async_wait<0>();
    __syncthreads();
    if (n + 1 < visits.count())
      prefill.load_keys(prefill.keys(), params.key_cache, visits.at(n + 1) * Shape::kKeys);
    copy_async_commit();
    if (prefill.logits.mapped) {
#pragma unroll
      for (int e = 0; e < Shape::kRowTiles * Prefill::kKeyTiles * 4; ++e)
        z[e / (Prefill::kKeyTiles * 4)][e / 4 % Prefill::kKeyTiles][e % 4] =
            prefill.logits.map(z[e / (Prefill::kKeyTiles * 4)][e / 4 % Prefill::kKeyTiles][e % 4]);
    }
    if (!of_each.hold_all(first_key, first_key + Shape::kKeys)) prefill.mask(z, first_key, first + warp_row);
    prefill.exponentiate(z);
    prefill.multiply_values(z, first_column);
  }
  copy_async_wait<0>();
  __syncthreads();
  prefill.finish(tile, head, first_column);
  __syncthreads();
  prefill.store(tile, head);
}

template <typename Element, int kHeadSize>
cudaError_t launch_mma_prefill(const SwaAttentionParams& params, const Launch& launch, int most_decode) {
  using Shape = MmaShape<kHeadSize>;
  constexpr auto kKernel = mma_prefill_kernel<Element, kHeadSize>;
  if (const cudaError_t error = allow_shared_memory<kKernel>(launch.device); error != cudaSuccess)
    return error;
  const int64_t tiles = max_query_tiles(params.packing, Shape::kRows, {most_decode});
  const dim3 blocks(static_cast<unsigned>(tiles * params.num_heads));
  return launch_overlapped(kKernel, blocks, dim3(Shape::kThreads), Shape::kSharedBytes, launch, params,
                           static_cast<int>(tiles), static_cast<int>(heads_per_section(params)), most_decode);
}

// One source file per element type keeps a build parallel.
#define ORTOLAN_INSTANTIATE_MMA_PREFILL(Element, kHeadSize) \
  template cudaError_t launch_mma_prefill<Element, kHeadSize>(const SwaAttentionParams&, const Launch&, int);

}  // namespace ortolan::cuda
