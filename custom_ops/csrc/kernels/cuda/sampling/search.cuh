// Searches the logits of one sequence, in their order and by weight, by histograms over digits; for all
// blocks of the sequence together.
#pragma once

#include "kernels/cuda/sampling/rows.cuh"

namespace ortolan::cuda::sampling {

constexpr int kDrawThreads = 1024;
constexpr float kUnit = 1099511627776.0f;  // 2^40, the weight of the most likely token

// The digits of an ordered logit, most significant first.
__device__ __forceinline__ int digit_bits(int level) { return level == 2 ? 10 : 11; }
__device__ __forceinline__ int digit_shift(int level) { return level == 0 ? 21 : level == 1 ? 10 : 0; }

// Waits for all blocks of a sequence; `arrivals` counts up and is never reset within a launch.
struct Barrier {
  uint32_t* arrivals;
  uint32_t expected = 0;

  __device__ void wait() {
    expected += gridDim.x;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(arrivals, 1);
      while (*static_cast<volatile uint32_t*>(arrivals) < expected) {
      }
      __threadfence();
    }
    __syncthreads();
  }
};

// The fixed-point weight of a logit.
struct Weigher {
  float largest;
  float inverse_temperature;

  __device__ __forceinline__ float share(uint32_t key) const {
    return expf(__fmul_rn(unordered(key) - largest, inverse_temperature));
  }
  __device__ __forceinline__ Count operator()(uint32_t key) const {
    return __float2ull_rn(share(key) * kUnit);
  }
};

struct Unit {
  __device__ __forceinline__ Count operator()(uint32_t) const { return 1; }
};

// Where a target falls: the bin (or the whole key) that holds it, and the weight below that.
struct Place {
  uint32_t key;
  Count below;
  Count total;
};

// Adds the weights of keys >= minimum whose digits above this level are `prefix` to the level's histogram.
template <typename Weight>
__device__ void fill(const Row& row, const Weight& weight, uint32_t minimum, int level, uint32_t prefix,
                     Count* histogram) {
  __shared__ Count bins[kBins];
  for (int bin = threadIdx.x; bin < kBins; bin += kDrawThreads) bins[bin] = 0;
  __syncthreads();
  const int shift = digit_shift(level), above = shift + digit_bits(level);
  const uint32_t mask = (1u << digit_bits(level)) - 1;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kDrawThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kDrawThreads + threadIdx.x; i < row.size; i += step) {
    const uint32_t key = ordered(row.at(i));
    if (key < minimum || static_cast<uint64_t>(key) >> above != prefix) continue;
    const Count value = weight(key);
    if (value) atomicAdd(&bins[key >> shift & mask], value);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < kBins; bin += kDrawThreads) {
    if (bins[bin]) atomicAdd(histogram + bin, bins[bin]);
  }
}

// Finds the bin with below <= target < below + its weight; bin 0 where the target is past the end.
__device__ inline Place find(const Count* histogram, Count target) {
  static_assert(kBins == 2 * kDrawThreads);
  __shared__ Count warps[kDrawThreads / 32];
  __shared__ Place place;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Count first = __ldcg(histogram + 2 * threadIdx.x), second = __ldcg(histogram + 2 * threadIdx.x + 1);
  Count inclusive = first + second;
  for (int offset = 1; offset < 32; offset *= 2) {
    const Count other = __shfl_up_sync(~0u, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  if (lane == 31) warps[warp] = inclusive;
  if (threadIdx.x == 0) place = {0, 0, 0};
  __syncthreads();
  for (int i = 0; i < warp; ++i) inclusive += warps[i];
  const Count middle = inclusive - second, start = middle - first;
  if (start <= target && target < middle) place = {2 * threadIdx.x, start, 0};
  if (middle <= target && target < inclusive) place = {2 * threadIdx.x + 1, middle, 0};
  __syncthreads();
  if (threadIdx.x == kDrawThreads - 1) place.total = inclusive;
  __syncthreads();
  const Place result = place;
  __syncthreads();
  return result;
}

// Finds the key at which the weights of keys >= minimum, ascending, pass the target.
template <typename Weight>
__device__ Place search(const Row& row, const Weight& weight, uint32_t minimum, Count target,
                        Count* first_level, bool first_is_filled, Count (*other_levels)[kBins],
                        Barrier& barrier) {
  Place result = {0, 0, 0};
  for (int level = 0; level < kLevels; ++level) {
    Count* histogram = level ? other_levels[level - 1] : first_level;
    if (level || !first_is_filled) {
      fill(row, weight, minimum, level, result.key, histogram);
      barrier.wait();
    }
    const Place place = find(histogram, target - result.below);
    if (!level) result.total = place.total;
    result.below += place.below;
    result.key = result.key << digit_bits(level) | place.key;
  }
  return result;
}

}  // namespace ortolan::cuda::sampling
