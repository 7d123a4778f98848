// One warpgroup's 64 rows of an sm_90a prefill tile: products, softmax, weighted sums, all in registers.
#pragma once

#include "kernels/cuda/common/warp.cuh"
#include "sm90_work.cuh"

namespace ortolan::cuda {

template <typename Element, typename Shape>
struct Sm90Rows {
  static constexpr int kKeys = Shape::kKeys;
  static constexpr int kColumns = Shape::kColumns;
  float sums[kColumns / 2];
  float maxima[2];
  float totals[2];
  float rescale[2];                 // of what was summed before the newest weights
  float z[kKeys / 2];               // logits, then weights
  uint32_t weights[kKeys / 16][4];  // rounded for the product with the values

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kColumns / 2; ++n) sums[n] = 0;
    maxima[0] = maxima[1] = -INFINITY;
    totals[0] = totals[1] = 0;
  }

  // Tiles as wgmma reads them.
  static __device__ __forceinline__ uint64_t rows_tile(uint32_t address) { return wgmma_tile(address, 16); }
  static __device__ __forceinline__ uint64_t values_tile(uint32_t address) {
    return wgmma_tile(address, kKeys * 128);
  }
  __device__ __forceinline__ void start_keys(uint64_t queries, uint64_t keys) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k)
      Wgmma<Element, kKeys>::products(z, moved_tile(queries, k / 4 * Shape::kRows * 128 + k % 4 * 32),
                                      moved_tile(keys, k / 4 * kKeys * 128 + k % 4 * 32), k > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_values(uint64_t values) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      Wgmma<Element, kColumns>::sums(sums, weights[k], moved_tile(values, k * 2048));
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
    for (int n = 0; n < kColumns / 2; ++n) asm volatile("" : "+f"(sums[n])::"memory");
#pragma unroll
    for (int n = 0; n < kKeys / 2; ++n) asm volatile("" : "+f"(z[n])::"memory");
  }

  // Positions of the thread's two rows and of the tile's first key.
  __device__ __forceinline__ void mask(const Visibility& visibility, int32_t row, int32_t second_row,
                                       int32_t key) {
    SeenPositions seen[2] = {visibility.of_query(row), visibility.of_query(second_row)};
    key += threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half)  // so that the compiler compares with constants
      seen[half] = {seen[half].oldest - key, seen[half].newest - key, seen[half].sink_end - key};
#pragma unroll
    for (int n = 0; n < kKeys / 2; ++n)
      if (!seen[n / 2 % 2].holds(n / 4 * 8 + n % 2)) z[n] = -INFINITY;
  }
  // The same where nothing lies before the window.
  __device__ __forceinline__ void mask_newest(const Visibility& visibility, int32_t row, int32_t second_row,
                                              int32_t key) {
    key += threadIdx.x % 4 * 2;
    int32_t end[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const SeenPositions seen = visibility.of_query(half ? second_row : row);
      end[half] = max(seen.newest + 1, seen.sink_end) - key;
    }
#pragma unroll
    for (int n = 0; n < kKeys / 2; ++n)
      if (n / 4 * 8 + n % 2 >= end[n / 2 % 2]) z[n] = -INFINITY;
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
  __device__ __forceinline__ bool is_rescaled() const {
    return !__all_sync(~0u, rescale[0] == 1 && rescale[1] == 1);
  }
  __device__ __forceinline__ void rescale_sums() {
#pragma unroll
    for (int n = 0; n < kColumns / 2; ++n) sums[n] *= rescale[n / 2 % 2];
  }
  // With two groups the branch comes before the wait: the compiler moves a wait to the front of straight
  // code, and then the softmax in front of it begins where the sums have ended. Among three, others' sums
  // fill that time.
  __device__ __forceinline__ void finish_values() {
    if constexpr (Shape::kTakesTurns) {
      if (is_rescaled()) {
        wait_values();
        rescale_sums();
      } else {
        wait_values();
      }
    } else {
      wait_values();
      if (is_rescaled()) rescale_sums();
    }
  }

  // A thread's sums as memory holds them, in pieces of 16 bytes: those of a warpgroup's threads side by side.
  static constexpr int kPieces = 1 + kColumns / 8;
  static constexpr int kPieceStride = 128;

  __device__ __forceinline__ void save(float4* place) const {
    __stcg(place, make_float4(maxima[0], maxima[1], totals[0], totals[1]));
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
      __stcg(place + (n + 1) * kPieceStride,
             make_float4(sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]));
  }
  __device__ __forceinline__ void restore(const float4* place) {
    const float4 state = __ldcg(place);
    maxima[0] = state.x, maxima[1] = state.y, totals[0] = state.z, totals[1] = state.w;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float4 piece = __ldcg(place + (n + 1) * kPieceStride);
      sums[4 * n] = piece.x, sums[4 * n + 1] = piece.y, sums[4 * n + 2] = piece.z, sums[4 * n + 3] = piece.w;
    }
  }
  // Adds those of other keys: with the same bits where the other's are added to these.
  __device__ __forceinline__ void add(const float4* place, float factor) {
    const float4 state = __ldcg(place);
    const float other_maxima[] = {state.x, state.y}, other_totals[] = {state.z, state.w};
    float own[2] = {}, other[2] = {};
    const auto add_to = [&](float& a, float b, int half) {
      a = __fadd_rn(__fmul_rn(a, own[half]), __fmul_rn(b, other[half]));
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float maximum = fmaxf(maxima[half], other_maxima[half]);
      const float base = __fmul_rn(finite_max(maximum), factor);
      own[half] = fast_exp2(__fmul_rn(maxima[half], factor) - base);
      other[half] = fast_exp2(__fmul_rn(other_maxima[half], factor) - base);
      add_to(totals[half], other_totals[half], half);
      maxima[half] = maximum;
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float4 piece = __ldcg(place + (n + 1) * kPieceStride);
      add_to(sums[4 * n], piece.x, 0);
      add_to(sums[4 * n + 1], piece.y, 0);
      add_to(sums[4 * n + 2], piece.z, 1);
      add_to(sums[4 * n + 3], piece.w, 1);
    }
  }

  // Divides and writes the rows. The four lanes that share some change columns for blocks of columns: each
  // writes whole pieces of 16 bytes. `first_column`: of the block.
  __device__ __forceinline__ void store(const SwaAttentionParams& params,
                                        const typename Shape::Chunks& chunks, const Sm90Work<Shape>& work,
                                        int group, int first_column, float factor) const {
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
    const int tokens = work.count_tokens(group, chunks.tokens());
    const int count = tokens * chunks.heads() - warp_row;  // of the warp's rows
    const int64_t first = work.tile.first + group * chunks.tokens();
    const int head_size = static_cast<int>(params.cache.head_size), column = first_column + lane % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      const int head = work.head + chunks.head(warp_row + row);
      const int64_t token = first + chunks.token(warp_row + row);
      const Denominator denominator = Denominator::of(quad_sum(totals[half]), __fmul_rn(maxima[half], factor),
                                                      params.sink_logits, row < count ? head : 0);
      if (params.lse && lane % 4 == 0 && row < count && first_column == 0)
        params.lse[head * params.packing.num_tokens + token] = denominator.lse;
      auto* to =
          static_cast<Element*>(params.output) + (token * params.num_heads + head) * head_size + column;
#pragma unroll
      for (int block = 0; block < kColumns / 32; ++block) {
        const auto pair = [&](int eight) {
          const float* own = sums + (block * 4 + eight) * 4 + half * 2;
          return Half<Element>::pack(own[0] * denominator.inverse, own[1] * denominator.inverse);
        };
        const uint4 piece = transpose_quad(uint4{pair(0), pair(1), pair(2), pair(3)});
        if (row < count && column + block * 32 < head_size)
          *reinterpret_cast<uint4*>(to + block * 32) = piece;
      }
    }
  }
};

}  // namespace ortolan::cuda
