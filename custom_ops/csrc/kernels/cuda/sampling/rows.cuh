// What choosing a token keeps in its workspace, and how the logits of one sequence are read, ranked and
// answered.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>

#include "kernels/cuda/sampling/sampling.h"

namespace ortolan::cuda::sampling {

using Count = unsigned long long;

constexpr int kMaxDrawBlocks = 64;
constexpr int kBins = 2048;
constexpr int kLevels = 3;
constexpr Count kBad = ~0ull;

// Histograms of one sequence's searches; those of the tail and of the draw share the first level of all mass.
struct Histograms {
  Count count[kLevels][kBins];
  Count mass[kBins];
  Count tail[kLevels - 1][kBins];
  Count draw[kLevels - 1][kBins];
};

struct SequenceState {
  Histograms histograms;
  Count best;      // (ordered logit, inverted index)
  Count low_mass;  // of tokens that min_p drops
  uint32_t arrivals;
  uint32_t ties[kMaxDrawBlocks];
};

struct Workspace {
  Count* best;        // [B]
  uint32_t* tickets;  // [B]
  SequenceState* states;
};

__host__ __device__ inline Workspace carve(void* memory, int64_t num_sequences) {
  char* bytes = static_cast<char*>(memory);
  const int64_t row = (num_sequences * 8 + 255) / 256 * 256;
  return {reinterpret_cast<Count*>(bytes), reinterpret_cast<uint32_t*>(bytes + row),
          reinterpret_cast<SequenceState*>(bytes + 2 * row)};
}

// Maps a float to an integer of the same order; both zeros are one value.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float unordered(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Greater for a larger logit, then for a lower index.
__device__ __forceinline__ Count rank_of(float logit, int64_t index) {
  return static_cast<Count>(ordered(logit)) << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}

// The logits of one sequence, after the repetition penalty, which leaves finite ones finite.
struct Row {
  const float* logits;
  const uint8_t* seen;
  float penalty;
  int64_t size;

  __device__ Row(const DecodeAdvanceParams& params, int64_t sequence)
      : logits(params.logits + sequence * params.vocab_size),
        seen(params.rules && params.seen ? params.seen + sequence * params.vocab_size : nullptr),
        penalty(params.rules ? params.rules[sequence].repetition_penalty : 1.0f),
        size(params.vocab_size) {}

  __device__ __forceinline__ float at(int64_t index) const {
    const float logit = logits[index];
    if (!seen || !seen[index]) return logit;
    const float penalized = logit > 0.0f ? logit / penalty : logit * penalty;
    return fminf(fmaxf(penalized, -FLT_MAX), FLT_MAX);
  }

  // Greater for a larger logit, then for a lower index; kBad where the logit is NaN or infinite.
  __device__ __forceinline__ Count rank(int64_t index) const {
    return isfinite(logits[index]) ? rank_of(at(index), index) : kBad;
  }
};

__device__ __forceinline__ int index_of(Count rank) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(rank));
}

template <int kThreads>
__device__ Count block_max(Count value) {
  __shared__ Count warps[kThreads / 32];
  for (int offset = 16; offset; offset /= 2) value = max(value, __shfl_xor_sync(~0u, value, offset));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < kThreads / 32; ++warp) value = max(value, warps[warp]);
  __syncthreads();
  return value;
}

template <int kThreads>
__device__ Count best_rank(const Row& row) {
  Count best = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < row.size; i += step) {
    best = max(best, row.rank(i));
  }
  return block_max<kThreads>(best);
}

// Writes the chosen token and moves the sequence on; called by all threads of one block per sequence, once no
// thread will read the sequence's rule or past_len any more.
__device__ inline void finish(const DecodeAdvanceParams& params, int64_t sequence, int token) {
  if (threadIdx.x == 0) {
    params.produced[sequence] = token;
    if (params.token_ids) params.token_ids[sequence] = max(token, 0);
    if (params.positions) params.positions[sequence] += params.advance_tokens;
    if (params.past_len) params.past_len[sequence] += params.advance_tokens;
    if (params.rules) ++params.rules[sequence].draw;
    if (params.seen && token >= 0) params.seen[sequence * params.vocab_size + token] = 1;
  }
  if (sequence == 0 && params.kv_len) {
    for (int64_t i = threadIdx.x; i < params.num_kv_lens; i += blockDim.x)
      params.kv_len[i] += params.advance_tokens;
  }
}

}  // namespace ortolan::cuda::sampling
