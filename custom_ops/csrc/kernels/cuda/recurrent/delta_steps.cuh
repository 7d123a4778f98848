// The gated delta rule token by token, with the state in registers: read once and written once.
//
// Grid: one block per (32 columns of Dv, value head, sequence). A thread owns four columns of a
// sixteenth of the rows of Dk; a row of 32 columns is one line of memory. A token's key and query find the
// sums
//     k S_t = exp(decay) k S_(t-1)   and   q S_t = exp(decay) q S_(t-1) + (q k) u
// over the state before the token: in the thread, over the lanes, then over the warps, in a fixed order. Kept
// updates are applied by the very function that applies a token's own: the bits do not tell them apart.
//
// What all blocks of a sequence read (kept keys, decays, the state's length) is written by a second kernel.
#pragma once

#include "delta_rows.cuh"
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/launch.cuh"

namespace ortolan::cuda {

constexpr int kDeltaThreads = 128;
constexpr int kDeltaColumns = 32;
constexpr int kDeltaGroups = 16;  // threads that share four columns
constexpr int kDeltaTile = 16;    // tokens whose keys and queries lie in shared memory

__device__ __forceinline__ void store_element(float x, float* target) { *target = x; }
__device__ __forceinline__ void store_element(float x, __half* target) { *target = __float2half_rn(x); }
__device__ __forceinline__ void store_element(float x, __nv_bfloat16* target) {
  *target = __float2bfloat16_rn(x);
}

// Four columns of float32 rows of Dv, those that exist; kWhole: all or none, and aligned.
template <bool kWhole>
__device__ __forceinline__ void load_columns(const float* row, int count, float (&values)[4]) {
  if constexpr (kWhole) {
    const float4 loaded = count > 0 ? *reinterpret_cast<const float4*>(row) : float4{};
    values[0] = loaded.x, values[1] = loaded.y, values[2] = loaded.z, values[3] = loaded.w;
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) values[c] = c < count ? row[c] : 0.0f;
  }
}
template <bool kWhole>
__device__ __forceinline__ void store_columns(const float (&values)[4], int count, float* row) {
  if constexpr (kWhole) {
    if (count > 0) *reinterpret_cast<float4*>(row) = make_float4(values[0], values[1], values[2], values[3]);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (c < count) row[c] = values[c];
  }
}

// What a tile of tokens gives all threads of a block.
struct alignas(16) DeltaTile {
  float dots[kDeltaTile];     // q k
  float factors[kDeltaTile];  // exp(decay)
  float betas[kDeltaTile];
  float values[kDeltaTile][kDeltaColumns];
  float kept_factors[kMaxRecentTokens];
  float kept_updates[kMaxRecentTokens][kDeltaColumns];
  float sums[2][kDeltaThreads / 32][2][kDeltaColumns];  // of k S and q S, by warp
};

template <typename Element, int kRows, bool kWhole>
class DeltaSteps {
 public:
  static constexpr int kKeyStride = kRows * kDeltaGroups;  // of rows in shared memory, which end in zeros

  __device__ DeltaSteps(const GatedDeltaRuleParams& p, DeltaTile& tile, float* keys, int tile_tokens)
      : p_(p),
        tile_(tile),
        sequence_(p, blockIdx.z),
        keys_(keys),
        queries_(keys + tile_tokens * kKeyStride),
        kept_keys_(queries_ + tile_tokens * kKeyStride),
        tile_tokens_(tile_tokens),
        head_(blockIdx.y),
        group_(threadIdx.x / 8),
        lane_columns_(threadIdx.x % 8 * 4),
        column_(blockIdx.x * int64_t{kDeltaColumns} + lane_columns_) {
    const int64_t left = p.value_size - column_;
    columns_ = left < 0 ? 0 : left > 4 ? 4 : static_cast<int>(left);
  }

  // `reads_long`: also the tokens of sequences that keep no updates.
  __device__ __forceinline__ void run(bool reads_long) {
    if (sequence_.count == 0) return;
    const bool keeps = p_.keeps_updates(sequence_.count), reads = keeps || reads_long;
    load_state();
    if (reads) load_tile(0, tile_count(0));
    const int64_t past = sequence_.past, known = past - p_.pending(sequence_.row, past);
    const int64_t committed = p_.committed(sequence_.row, past, sequence_.count);
    load_kept(known);
    __syncthreads();
    apply_kept(known, known, committed);
    if (committed > known || past == 0) store_state();
    apply_kept(known, committed, past);
    if (!reads) return;
    for (int64_t first = 0; first < sequence_.count; first += tile_tokens_) {
      if (first > 0) {
        __syncthreads();
        load_tile(first, tile_count(first));
        __syncthreads();
      }
      read_tile(first, keeps);
    }
    if (!keeps) store_state();
  }

 private:
  __device__ __forceinline__ float* state_row(int i) const {
    const int64_t row = p_.state_row(sequence_.row, head_) + (group_ * kRows + i) * p_.value_size;
    return p_.state + row + column_;
  }
  __device__ __forceinline__ bool has_row(int i) const { return group_ * kRows + i < p_.key_size; }

  __device__ __forceinline__ void load_state() {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      load_columns<kWhole>(state_row(i), has_row(i) && sequence_.past > 0 ? columns_ : 0, state_[i]);
  }
  __device__ __forceinline__ void store_state() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) store_columns<kWhole>(state_[i], has_row(i) ? columns_ : 0, state_row(i));
  }

  __device__ __forceinline__ void load_key(const float* row, float (&key)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(row + group_ * kRows + i);
      key[i] = four.x, key[i + 1] = four.y, key[i + 2] = four.z, key[i + 3] = four.w;
    }
  }
  __device__ __forceinline__ void apply(const float (&key)[kRows], const float (&update)[4], float factor) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) state_[i][c] = fmaf(key[i], update[c], __fmul_rn(factor, state_[i][c]));
  }

  // Brings the kept updates of positions known .. past to shared memory. All loads start before their first
  // use.
  __device__ __forceinline__ void load_kept(int64_t known) {
    const int count = static_cast<int>(sequence_.past - known), size = static_cast<int>(p_.key_size);
    const int64_t head = p_.key_head(head_);
#pragma unroll 16
    for (int i = threadIdx.x; i < count * kKeyStride; i += kDeltaThreads) {
      const int64_t kept = p_.kept_row(sequence_.row, known + i / kKeyStride) * p_.num_key_heads + head;
      const int column = i % kKeyStride;
      kept_keys_[i] = column < size ? p_.recent_keys[kept * size + column] : 0.0f;
    }
    if (group_ < count) {
      const int64_t kept = p_.kept_row(sequence_.row, known + group_) * p_.num_value_heads + head_;
      float update[4];
      load_columns<kWhole>(p_.recent_updates + kept * p_.value_size + column_, columns_, update);
      *reinterpret_cast<float4*>(&tile_.kept_updates[group_][lane_columns_]) =
          make_float4(update[0], update[1], update[2], update[3]);
      if (lane_columns_ == 0) tile_.kept_factors[group_] = expf(p_.recent_decays[kept]);
    }
  }
  // Applies those of positions first .. end.
  __device__ __forceinline__ void apply_kept(int64_t known, int64_t first, int64_t end) {
    for (int t = static_cast<int>(first - known); t < static_cast<int>(end - known); ++t) {
      float key[kRows], update[4];
      load_key(kept_keys_ + t * kKeyStride, key);
      load_columns<true>(&tile_.kept_updates[t][lane_columns_], 4, update);
      apply(key, update, tile_.kept_factors[t]);
    }
  }

  __device__ __forceinline__ int tile_count(int64_t first) const {
    const int64_t left = sequence_.count - first;
    return static_cast<int>(left < tile_tokens_ ? left : tile_tokens_);
  }

  // A warp normalises the keys and queries of every fourth token. All its loads start before their first use.
  __device__ __forceinline__ void load_tile(int64_t first, int count) {
    constexpr int kLaneKeys = kRows * kDeltaGroups / 32;
    const int lane = threadIdx.x % 32;
    for (int t = threadIdx.x / 32; t < count; t += kDeltaThreads / 32) {
      const int64_t token = sequence_.first + first + t;
      const int64_t row = token * p_.num_value_heads + head_;
      const int64_t column = blockIdx.x * int64_t{kDeltaColumns} + lane;
      const Element* keys = key_row<Element>(p_, p_.key, token, p_.key_head(head_));
      const Element* queries = key_row<Element>(p_, p_.query, token, p_.key_head(head_));
      float key[kLaneKeys], query[kLaneKeys];
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        const bool exists = i * 32 + lane < p_.key_size;
        key[i] = exists ? to_float(keys[i * 32 + lane]) : 0.0f;
        query[i] = exists ? to_float(queries[i * 32 + lane]) : 0.0f;
      }
      const float decay = p_.decay[row], beta = p_.beta[row];
      float value = 0;
      if (column < p_.value_size)
        value = to_float(static_cast<const Element*>(p_.value)[row * p_.value_size + column]);
      float squares[2] = {0, 0}, dot = 0;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        squares[0] = fmaf(key[i], key[i], squares[0]);
        squares[1] = fmaf(query[i], query[i], squares[1]);
      }
      fold_lanes<16, 1>(squares, Add());
      const float key_factor = length_factor(p_, squares[0]), query_factor = length_factor(p_, squares[1]);
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        key[i] *= key_factor;
        query[i] *= query_factor;
        dot = fmaf(query[i], key[i], dot);
        keys_[t * kKeyStride + i * 32 + lane] = key[i];
        queries_[t * kKeyStride + i * 32 + lane] = query[i];
      }
      dot = warp_sum(dot);
      if (lane == 0) {
        tile_.dots[t] = dot;
        tile_.factors[t] = expf(decay);
        tile_.betas[t] = beta;
      }
      tile_.values[t][lane] = value;
    }
  }

  // kS and qS of this thread's columns, the same in every group.
  __device__ __forceinline__ void sum_rows(const float (&key)[kRows], const float (&query)[kRows], int stage,
                                           float (&sums)[8]) {
#pragma unroll
    for (int c = 0; c < 8; ++c) sums[c] = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sums[c] = fmaf(key[i], state_[i][c], sums[c]);
        sums[4 + c] = fmaf(query[i], state_[i][c], sums[4 + c]);
      }
    fold_lanes<8, 16>(sums, Add());
    if (threadIdx.x % 32 < 8) {
#pragma unroll
      for (int c = 0; c < 8; ++c) tile_.sums[stage][threadIdx.x / 32][c / 4][lane_columns_ + c % 4] = sums[c];
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      sums[c] = 0;
#pragma unroll
      for (int w = 0; w < kDeltaThreads / 32; ++w)
        sums[c] += tile_.sums[stage][w][c / 4][lane_columns_ + c % 4];
    }
  }

  __device__ __forceinline__ void read_tile(int64_t first, bool keeps) {
    const int count = tile_count(first);
    for (int t = 0; t < count; ++t) {
      float key[kRows], query[kRows], sums[8], update[4];
      load_key(keys_ + t * kKeyStride, key);
      load_key(queries_ + t * kKeyStride, query);
      sum_rows(key, query, t % 2, sums);
      const float factor = tile_.factors[t], beta = tile_.betas[t];
#pragma unroll
      for (int c = 0; c < 4; ++c)
        update[c] = beta * fmaf(-factor, sums[c], tile_.values[t][lane_columns_ + c]);
      if (group_ == t % kDeltaGroups) write(first + t, keeps, sums, update, factor, tile_.dots[t]);
      if (!keeps || first + t + 1 < sequence_.count) apply(key, update, factor);
    }
  }

  __device__ __forceinline__ void write(int64_t token, bool keeps, const float (&sums)[8],
                                        const float (&update)[4], float factor, float dot) {
    const int64_t row = (sequence_.first + token) * p_.num_value_heads + head_;
    Element* output = static_cast<Element*>(p_.output) + row * p_.value_size + column_;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (c < columns_) store_element(p_.scale * fmaf(dot, update[c], factor * sums[4 + c]), output + c);
    if (!keeps) return;
    const int64_t kept = p_.kept_row(sequence_.row, sequence_.past + token) * p_.num_value_heads + head_;
    store_columns<kWhole>(update, columns_, p_.recent_updates + kept * p_.value_size + column_);
  }

  const GatedDeltaRuleParams& p_;
  DeltaTile& tile_;
  DeltaSequence sequence_;
  float* keys_;       // [tile_tokens, kKeyStride]
  float* queries_;    // [tile_tokens, kKeyStride]
  float* kept_keys_;  // [R, kKeyStride]
  int tile_tokens_;
  int64_t head_;
  int group_;
  int lane_columns_;
  int64_t column_;
  int columns_;  // of this thread that exist
  float state_[kRows][4];
};

template <typename Element, int kRows, bool kWhole>
__global__ void __launch_bounds__(kDeltaThreads, kRows <= 8 ? 5 : 3)
    delta_steps(const GatedDeltaRuleParams p, int tile_tokens, bool reads_long) {
  extern __shared__ __align__(16) float keys[];
  __shared__ DeltaTile tile;
  launch_dependents();
  wait_for_previous_kernel();
  DeltaSteps<Element, kRows, kWhole>(p, tile, keys, tile_tokens).run(reads_long);
}

// Writes what blocks of delta_steps read. Grid: (key head, sequence); a warp takes every fourth token.
template <typename Element>
__global__ void __launch_bounds__(kDeltaThreads) finish_steps(const GatedDeltaRuleParams p) {
  launch_dependents();
  wait_for_previous_kernel();
  const DeltaSequence sequence(p, blockIdx.y);
  if (sequence.count == 0) return;
  const bool keeps = p.keeps_updates(sequence.count);
  if (blockIdx.x == 0 && threadIdx.x == 0)
    p.state_len[sequence.row] = static_cast<int32_t>(
        keeps ? p.committed(sequence.row, sequence.past, sequence.count) : sequence.past + sequence.count);
  if (!keeps) return;
  const int lane = threadIdx.x % 32, head = blockIdx.x;
  const int group = static_cast<int>(p.num_value_heads / p.num_key_heads);
  for (int64_t token = threadIdx.x / 32; token < sequence.count; token += kDeltaThreads / 32) {
    const Element* key = key_row<Element>(p, p.key, sequence.first + token, head);
    const int64_t kept = p.kept_row(sequence.row, sequence.past + token);
    const float factor = unit_factor(p, key, lane);
    float* target = p.recent_keys + (kept * p.num_key_heads + head) * p.key_size;
    for (int i = lane; i < p.key_size; i += 32) target[i] = to_float(key[i]) * factor;
    for (int i = head * group + lane; i < (head + 1) * group; i += 32)
      p.recent_decays[kept * p.num_value_heads + i] =
          p.decay[(sequence.first + token) * p.num_value_heads + i];
  }
}

}  // namespace ortolan::cuda
