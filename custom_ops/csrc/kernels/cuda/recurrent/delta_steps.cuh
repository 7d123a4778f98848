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
#include "kernels/cuda/common/ptx.cuh"

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
        recent_(static_cast<int>(p.recent_tokens)),
        key_size_(static_cast<int>(p.key_size)),
        value_size_(static_cast<int>(p.value_size)),
        group_(threadIdx.x / 8),
        lane_columns_(threadIdx.x % 8 * 4),
        column_(blockIdx.x * kDeltaColumns + lane_columns_) {
    const int left = value_size_ - column_;
    columns_ = left < 0 ? 0 : left > 4 ? 4 : left;
    rows_ = p.state + p.state_row(sequence_.row, blockIdx.y) + group_ * kRows * value_size_ + column_;
  }

  // `reads_long`: also the tokens of sequences that keep no updates.
  __device__ __forceinline__ void run(bool reads_long) {
    if (sequence_.count == 0) return;
    const bool keeps = p_.keeps_updates(sequence_.count), reads = keeps || reads_long;
    load_state();
    const int64_t past = sequence_.past;
    if (past > 0) load_kept();
    const int64_t pending = p_.pending(sequence_.row, past);
    const int64_t committed = p_.committed(sequence_.row, past, sequence_.count);
    if (reads) load_tile(0, tile_count(0));
    copy_async_wait<0>();
    __syncthreads();
    const int known = static_cast<int>(committed - (past - pending));
    int slot = static_cast<int>(static_cast<uint32_t>(past - pending) % static_cast<uint32_t>(recent_));
    slot = apply_kept(slot, known);
    if (known > 0 || past == 0) store_state();
    apply_kept(slot, static_cast<int>(pending) - known);
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
  __device__ __forceinline__ bool has_row(int i) const { return group_ * kRows + i < key_size_; }

  // States pass through L2 on their way: the next step reads them after all others of the model.
  __device__ __forceinline__ void load_state() {
    const int columns = sequence_.past > 0 ? columns_ : 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float* row = rows_ + i * value_size_;
      const int count = has_row(i) ? columns : 0;
      if constexpr (kWhole) {
        const float4 four = count > 0 ? __ldcs(reinterpret_cast<const float4*>(row)) : float4{};
        state_[i][0] = four.x, state_[i][1] = four.y, state_[i][2] = four.z, state_[i][3] = four.w;
      } else {
        load_columns<false>(row, count, state_[i]);
      }
    }
  }
  __device__ __forceinline__ void store_state() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float* row = rows_ + i * value_size_;
      const int count = has_row(i) ? columns_ : 0;
      if constexpr (kWhole) {
        const float4 four = make_float4(state_[i][0], state_[i][1], state_[i][2], state_[i][3]);
        if (count > 0) __stcs(reinterpret_cast<float4*>(row), four);
      } else {
        store_columns<false>(state_[i], count, row);
      }
    }
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

  // Brings all rows of kept updates to shared memory.
  __device__ __forceinline__ void load_kept() {
    const int64_t first = sequence_.row * recent_;
    const float* keys = p_.recent_keys + (first * p_.num_key_heads + p_.key_head(blockIdx.y)) * key_size_;
    const int64_t update = (first + group_) * p_.num_value_heads + blockIdx.y;
    const float* updates = p_.recent_updates + update * value_size_ + column_;
    float* const own_updates = &tile_.kept_updates[group_ % kMaxRecentTokens][lane_columns_];
    const int key_rows = static_cast<int>(p_.num_key_heads) * key_size_;
    if constexpr (kWhole) {
      constexpr int kPieces = kKeyStride / 4;
#pragma unroll 4
      for (int i = threadIdx.x; i < recent_ * kPieces; i += kDeltaThreads) {
        const int column = i % kPieces * 4;
        const bool exists = column < key_size_;
        copy_async_16(kept_keys_ + i * 4, keys + i / kPieces * key_rows + (exists ? column : 0), exists);
      }
      if (group_ < recent_)
        copy_async_16(own_updates, columns_ > 0 ? updates : p_.recent_updates, columns_ > 0);
    } else {
      for (int i = threadIdx.x; i < recent_ * kKeyStride; i += kDeltaThreads) {
        const int column = i % kKeyStride;
        kept_keys_[i] = column < key_size_ ? keys[i / kKeyStride * key_rows + column] : 0.0f;
      }
      if (group_ < recent_) {
        float four[4];
        load_columns<false>(updates, columns_, four);
        store_columns<true>(four, 4, own_updates);
      }
    }
    copy_async_commit();
    if (group_ < recent_ && lane_columns_ == 0) tile_.kept_factors[group_] = expf(p_.recent_decays[update]);
  }
  // Applies so many, from a row of the ring on; returns the row behind them.
  __device__ __forceinline__ int apply_kept(int slot, int count) {
    for (int t = 0; t < count; ++t) {
      float key[kRows], update[4];
      load_key(kept_keys_ + slot * kKeyStride, key);
      load_columns<true>(&tile_.kept_updates[slot][lane_columns_], 4, update);
      apply(key, update, tile_.kept_factors[slot]);
      slot = slot + 1 == recent_ ? 0 : slot + 1;
    }
    return slot;
  }

  __device__ __forceinline__ int tile_count(int64_t first) const {
    const int64_t left = sequence_.count - first;
    return static_cast<int>(left < tile_tokens_ ? left : tile_tokens_);
  }

  // A warp normalises the keys and queries of every fourth token. All its loads start before their first use.
  __device__ __forceinline__ void load_tile(int64_t first, int count) {
    constexpr int kLaneKeys = kRows * kDeltaGroups / 32;
    const int lane = threadIdx.x % 32, column = blockIdx.x * kDeltaColumns + lane;
    for (int t = threadIdx.x / 32; t < count; t += kDeltaThreads / 32) {
      const int64_t token = sequence_.first + first + t;
      const int64_t row = token * p_.num_value_heads + blockIdx.y;
      const int64_t head = p_.key_head(blockIdx.y);
      const Element* keys = key_row<Element>(p_, p_.key, token, head) + lane;
      const Element* queries = key_row<Element>(p_, p_.query, token, head) + lane;
      float key[kLaneKeys], query[kLaneKeys];
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        const bool exists = i * 32 + lane < key_size_;
        key[i] = exists ? to_float(keys[i * 32]) : 0.0f;
        query[i] = exists ? to_float(queries[i * 32]) : 0.0f;
      }
      const float decay = p_.decay[row], beta = p_.beta[row];
      float value = 0;
      if (column < value_size_)
        value = to_float(static_cast<const Element*>(p_.value)[row * value_size_ + column]);
      float sums[3] = {0, 0, 0};
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        sums[0] = fmaf(key[i], key[i], sums[0]);
        sums[1] = fmaf(query[i], query[i], sums[1]);
        sums[2] = fmaf(query[i], key[i], sums[2]);
      }
      fold_lanes<16, 1>(sums, Add());
      const float key_factor = length_factor(p_, sums[0]), query_factor = length_factor(p_, sums[1]);
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        keys_[t * kKeyStride + i * 32 + lane] = key[i] * key_factor;
        queries_[t * kKeyStride + i * 32 + lane] = query[i] * query_factor;
      }
      if (lane == 0) {
        tile_.dots[t] = sums[2] * key_factor * query_factor;
        tile_.factors[t] = expf(decay);
        tile_.betas[t] = beta;
      }
      tile_.values[t][lane] = value;
    }
  }

  // Adds kS and qS of this thread's columns up over a warp and leaves them in shared memory. Of the four
  // lanes that share columns each keeps two of the eight sums.
  __device__ __forceinline__ void sum_rows(const float (&key)[kRows], const float (&query)[kRows],
                                           int stage) {
    float sums[2][4] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sums[0][c] = fmaf(key[i], state_[i][c], sums[0][c]);
        sums[1][c] = fmaf(query[i], state_[i][c], sums[1][c]);
      }
    const bool of_query = threadIdx.x & 8, last_pair = threadIdx.x & 16;
    float four[4], pair[2];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float other = __shfl_xor_sync(~0u, of_query ? sums[0][c] : sums[1][c], 8);
      four[c] = (of_query ? sums[1][c] : sums[0][c]) + other;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float other = __shfl_xor_sync(~0u, last_pair ? four[c] : four[2 + c], 16);
      pair[c] = (last_pair ? four[2 + c] : four[c]) + other;
    }
    float* target = &tile_.sums[stage][threadIdx.x / 32][of_query][lane_columns_ + (last_pair ? 2 : 0)];
    *reinterpret_cast<float2*>(target) = make_float2(pair[0], pair[1]);
  }
  // The sums over all warps, of k S (0) or q S (1).
  __device__ __forceinline__ void total(int stage, int which, float (&sums)[4]) const {
    load_columns<true>(&tile_.sums[stage][0][which][lane_columns_], 4, sums);
#pragma unroll
    for (int w = 1; w < kDeltaThreads / 32; ++w) {
      float four[4];
      load_columns<true>(&tile_.sums[stage][w][which][lane_columns_], 4, four);
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[c] += four[c];
    }
  }

  __device__ __forceinline__ void read_tile(int64_t first, bool keeps) {
    const int count = tile_count(first);
    for (int t = 0; t < count; ++t) {
      float key[kRows], query[kRows], sums[4], update[4];
      load_key(keys_ + t * kKeyStride, key);
      load_key(queries_ + t * kKeyStride, query);
      sum_rows(key, query, t % 2);
      __syncthreads();
      const bool writes = group_ == t % kDeltaGroups, goes_on = !keeps || first + t + 1 < sequence_.count;
      if (!writes && !goes_on) return;
      const float factor = tile_.factors[t], beta = tile_.betas[t];
      total(t % 2, 0, sums);
#pragma unroll
      for (int c = 0; c < 4; ++c)
        update[c] = beta * fmaf(-factor, sums[c], tile_.values[t][lane_columns_ + c]);
      if (writes) {
        total(t % 2, 1, sums);
        write(first + t, keeps, sums, update, factor, tile_.dots[t]);
      }
      if (goes_on) apply(key, update, factor);
    }
  }

  // Writes the output from q S, and the update where it is kept.
  __device__ __forceinline__ void write(int64_t token, bool keeps, const float (&sums)[4],
                                        const float (&update)[4], float factor, float dot) {
    const int64_t row = (sequence_.first + token) * p_.num_value_heads + blockIdx.y;
    Element* output = static_cast<Element*>(p_.output) + row * value_size_ + column_;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (c < columns_) store_element(p_.scale * fmaf(dot, update[c], factor * sums[c]), output + c);
    if (!keeps) return;
    const int64_t kept = p_.kept_row(sequence_.row, sequence_.past + token) * p_.num_value_heads + blockIdx.y;
    store_columns<kWhole>(update, columns_, p_.recent_updates + kept * value_size_ + column_);
  }

  const GatedDeltaRuleParams& p_;
  DeltaTile& tile_;
  DeltaSequence sequence_;
  float* keys_;       // [tile_tokens, kKeyStride]
  float* queries_;    // [tile_tokens, kKeyStride]
  float* kept_keys_;  // [R, kKeyStride]
  int tile_tokens_;
  int recent_;
  int key_size_;
  int value_size_;
  int group_;
  int lane_columns_;
  int column_;
  int columns_;  // of this thread that exist
  float* rows_;  // of the state, this thread's first one
  float state_[kRows][4];
};

template <typename Element, int kRows, bool kWhole>
__global__ void __launch_bounds__(kDeltaThreads, kRows > 8 ? 3
                                                 : kWhole  ? 5
                                                           : 4)
    delta_steps(const GatedDeltaRuleParams p, int tile_tokens, bool reads_long) {
  extern __shared__ __align__(16) float keys[];
  __shared__ DeltaTile tile;
  launch_dependents();
  wait_for_previous_kernel();
  DeltaSteps<Element, kRows, kWhole>(p, tile, keys, tile_tokens).run(reads_long);
}

// Writes what blocks of delta_steps read. Grid: (warps of pairs of token and key head, sequence).
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
  constexpr int kWarps = kDeltaThreads / 32;
  const int lane = threadIdx.x % 32, heads = static_cast<int>(p.num_key_heads);
  const int group = static_cast<int>(p.num_value_heads) / heads,
            pairs = static_cast<int>(sequence.count) * heads;
  for (int pair = blockIdx.x * kWarps + threadIdx.x / 32; pair < pairs; pair += gridDim.x * kWarps) {
    const int token = pair / heads, head = pair % heads;
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
