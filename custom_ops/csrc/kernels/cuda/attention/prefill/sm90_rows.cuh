// One warpgroup's 64 rows of an sm_90a prefill tile: products, softmax, weighted sums, all in registers.
#pragma once

#include "kernels/cuda/common/warp.cuh"
#include "sm90_work.cuh"

namespace ortolan::cuda {

template <typename Element, int kHeadSize, typename Shape>
struct Sm90Rows {
  static constexpr int kKeys = Shape::kKeys;
  float sums[kHeadSize / 2];
  float maxima[2];
  float totals[2];
  float rescale[2];                 // of what was summed before the newest weights
  float z[kKeys / 2];               // logits, then weights
  uint32_t weights[kKeys / 16][4];  // rounded for the product with the values

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kHeadSize / 2; ++n) sums[n] = 0;
    maxima[0] = maxima[1] = -INFINITY;
    totals[0] = totals[1] = 0;
  }

  __device__ __forceinline__ void start_keys(uint32_t queries, uint32_t keys) {
    const uint64_t a = wgmma_tile(queries, 16), b = wgmma_tile(keys, 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; ++k)
      Wgmma<Element, kKeys>::products(z, moved_tile(a, k / 4 * Shape::kRows * 128 + k % 4 * 32),
                                      moved_tile(b, k / 4 * kKeys * 128 + k % 4 * 32), k > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_values(uint32_t values) {
    const uint64_t b = wgmma_tile(values, kKeys * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      Wgmma<Element, kHeadSize>::sums(sums, weights[k], moved_tile(b, k * 2048));
    wgmma_commit();
  }
  // Waits for products, the newest `kPending` apart.
  template <int kPending>
  __device__ __forceinline__ void wait_keys() {
    wgmma_wait<kPending>();
#pragma unroll
    for (int n = 0; n < kKeys / 2; ++n) asm volatile("" : "+f"(z[n])::"memory");
  }
  __device__ __forceinline__ void wait_values() {
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kHeadSize / 2; ++n) asm volatile("" : "+f"(sums[n])::"memory");
#pragma unroll
    for (int n = 0; n < kKeys / 2; ++n) asm volatile("" : "+f"(z[n])::"memory");
  }

  // `row` and `key`: positions of the thread's first row and of the tile's first key.
  __device__ __forceinline__ void mask(const Visibility& visibility, int32_t row, int32_t key) {
    const SeenPositions seen[2] = {visibility.of_query(row), visibility.of_query(row + 8)};
    key += threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kKeys / 2; ++n)
      if (!seen[n / 2 % 2].holds(key + n / 4 * 8 + n % 2)) z[n] = -INFINITY;
  }

  // Logits become weights. What waits on one another is kept short: a scheduler has two or three warps.
  __device__ __forceinline__ void weigh(float factor) {
    float largest[2][2];
#pragma unroll
    for (int n = 0; n < 4; ++n)
      largest[n / 2][n % 2] = fmaxf(z[2 * (n / 2) + n % 2 * 4], z[2 * (n / 2) + n % 2 * 4 + 1]);
#pragma unroll
    for (int n = 2; n < kKeys / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        largest[half][n % 2] =
            fmaxf(largest[half][n % 2], fmaxf(z[4 * n + 2 * half], z[4 * n + 2 * half + 1]));
    float maximum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      maximum[half] = fmaxf(fmaxf(largest[half][0], largest[half][1]), maxima[half]);
    fold_lanes<1, 2>(maximum, Max());
    float base[2], total[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      base[half] = __fmul_rn(finite_max(maximum[half]), factor);
      // Rounded before it is subtracted: where the maximum stays, the factor is exactly 1.
      rescale[half] = fast_exp2(__fmul_rn(maxima[half], factor) - base[half]);
      maxima[half] = maximum[half];
      total[half][0] = total[half][1] = 0;
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& low = z[4 * n + 2 * half];
        float& high = z[4 * n + 2 * half + 1];
        low = fast_exp2(fmaf(low, factor, -base[half]));
        high = fast_exp2(fmaf(high, factor, -base[half]));
        total[half][0] += low;
        total[half][1] += high;
      }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      totals[half] = fmaf(totals[half], rescale[half], total[half][0] + total[half][1]);
  }
  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int n = 0; n < kKeys / 4; ++n) weights[n / 4][n % 4] = Half<Element>::pack(z[2 * n], z[2 * n + 1]);
  }
  __device__ __forceinline__ void rescale_sums() {
    if (__all_sync(~0u, rescale[0] == 1 && rescale[1] == 1)) return;
#pragma unroll
    for (int n = 0; n < kHeadSize / 2; ++n) sums[n] *= rescale[n / 2 % 2];
  }
  // Divides and writes the rows: the four threads of a row exchange what they hold into pieces of 16 bytes.
  __device__ __forceinline__ void store(const SwaAttentionParams& params, const Sm90Work<Shape>& work,
                                        int row, float factor) {
    const int lane = threadIdx.x % 32, part = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_sum(totals[half]);
      const Denominator denominator =
          Denominator::of(total, __fmul_rn(maxima[half], factor), params.sink_logits, work.head);
      const float inverse = denominator.inverse;
      const int tile_row = row + half * 8;
      const bool exists = tile_row < work.tile.count;
      const int64_t token = work.tile.first + tile_row;
      if (params.lse && part == 0 && exists)
        params.lse[work.head * params.packing.num_tokens + token] = denominator.lse;
      auto* output = static_cast<Element*>(params.output) +
                     (token * params.num_heads + work.head) * kHeadSize + part * 8;
#pragma unroll
      for (int n = 0; n < kHeadSize / 32; ++n) {
        uint32_t mine[4];  // columns part * 2 .. + 2 of four blocks of 8
#pragma unroll
        for (int block = 0; block < 4; ++block)
          mine[block] = Half<Element>::pack(sums[(n * 4 + block) * 4 + 2 * half] * inverse,
                                            sums[(n * 4 + block) * 4 + 2 * half + 1] * inverse);
        uint32_t piece[4];  // block `part`, columns source * 2 .. + 2
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          // Thread p sends block p ^ step to thread p ^ step, and gets block p from it.
          const int other = part ^ step;
          uint32_t sent = mine[0];
#pragma unroll
          for (int block = 1; block < 4; ++block)
            if (other == block) sent = mine[block];
          const uint32_t got = __shfl_xor_sync(~0u, sent, step);
#pragma unroll
          for (int source = 0; source < 4; ++source)
            if (other == source) piece[source] = got;
        }
        if (exists)
          *reinterpret_cast<uint4*>(output + n * 32) = make_uint4(piece[0], piece[1], piece[2], piece[3]);
      }
    }
  }
};

}  // namespace ortolan::cuda
