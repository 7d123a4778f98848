// SnapKvScore in two passes over the keys: each query's softmax state, then the sum of its probabilities per
// key.
//
// A warp multiplies 16 keys with the queries of one head, `kQueries` at a time, which wait in shared memory:
// keys are the rows of the product, so a key's sum over queries stays inside four threads. First pass, grid
// (spans, sequences * kv heads): a block walks the tiles of its span and keeps each query's (maximum, sum) in
// shared memory; `fold_kernel` merges the spans. Second pass, grid (tiles, sequences * kv heads):
// probabilities, their mean over queries, the group's reduction. Every order of additions follows from shapes
// and kv_len: no atomics, equal runs give equal bits. Source: SnapKV, arXiv 2404.14469, section 4.
#pragma once

#include "kernels.h"
#include "key_rows.cuh"
#include "ptx.cuh"
#include "softmax.cuh"

namespace ortolan::cuda {

// Tiles such that keys and two blocks of queries fit 99 KiB, what every GPU since sm_80 gives a block.
template <typename Element, int kHeadSize>
struct ScoreTile {
  static constexpr int kRowBytes = kHeadSize * static_cast<int>(sizeof(Element));
  static constexpr int kWarps = kRowBytes <= 256 ? 8 : kRowBytes <= 1024 ? 4 : 2;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kKeys = kWarps * 16;
  static constexpr int kQueries = kRowBytes <= 512 ? 32 : kRowBytes <= 1024 ? 16 : 8;
  static constexpr int kStride = kHeadSize + 16 / static_cast<int>(sizeof(Element));
  static constexpr int kSharedBytes = (kKeys + 2 * kQueries) * kStride * static_cast<int>(sizeof(Element));
};

struct SoftmaxState {
  float maximum;  // in units of log2
  float sum;
};

// Sizes that follow from shapes, and where states lie.
struct ScorePlan {
  int group;         // query heads per kv head
  int query_blocks;  // of kQueries, per head
  int rows;          // states per sequence and kv head: group * query_blocks * kQueries
  int spans;         // of the capacity
  int tiles_per_span;
  SoftmaxState* partials;  // [B * Hkv, spans, rows]
  SoftmaxState* states;    // [B * Hkv, rows]: maximum, and 1 / sum (0 where there is no query)
};

// One sequence and kv head.
struct ScorePair {
  int sequence;
  int kv_head;
  int32_t length;   // keys
  int32_t queries;  // n
  int32_t first;    // position of the first query; keys before it are scored

  static __device__ __forceinline__ ScorePair of(const SnapKvScoreParams& p, int index) {
    ScorePair pair;
    const int kv_heads = static_cast<int>(p.cache.num_kv_heads);
    pair.sequence = index / kv_heads;
    pair.kv_head = index % kv_heads;
    const auto capacity = static_cast<int32_t>(p.cache.capacity);
    const auto length = static_cast<int32_t>(p.kv_len.at(pair.sequence, pair.kv_head));
    pair.length = length < 0 ? 0 : length < capacity ? length : capacity;
    pair.queries = min(static_cast<int32_t>(p.window_rows), pair.length);
    pair.first = pair.length - pair.queries;
    return pair;
  }
};

template <typename Element, int kHeadSize>
struct ScoreBlock {
  using Tile = ScoreTile<Element, kHeadSize>;
  static constexpr int kPiece = 16 / static_cast<int>(sizeof(Element));  // elements of a 16-byte copy
  static constexpr int kPieces = kHeadSize / kPiece;
  static constexpr int kQueryTiles = Tile::kQueries / 8;
  using Products =
      float[kQueryTiles][4];  // rows: keys lane / 4 and + 8; columns: queries lane % 4 * 2 and + 1

  const SnapKvScoreParams& p;
  const ScorePlan& plan;
  ScorePair pair;
  Element* shared;

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int blocks() const { return plan.group * plan.query_blocks; }
  __device__ __forceinline__ Element* queries(int block) const {
    return shared + (Tile::kKeys + block % 2 * Tile::kQueries) * Tile::kStride;
  }

  __device__ __forceinline__ void load_keys(int32_t first) const {
    const auto* source = static_cast<const Element*>(p.key_cache);
    const KeyRows rows(p.cache, pair.sequence, pair.kv_head);
    for (int i = threadIdx.x; i < Tile::kKeys * kPieces; i += Tile::kThreads) {
      const int row = i / kPieces, column = i % kPieces * kPiece;
      const bool valid = first + row < pair.length && column < p.cache.head_size;
      copy_async_16(shared + row * Tile::kStride + column,
                    source + (valid ? rows.offset(first + row) + column : 0), valid);
    }
  }

  __device__ __forceinline__ void load_queries(int block) const {
    const auto* source = static_cast<const Element*>(p.capture);
    const int head = pair.kv_head * plan.group + block / plan.query_blocks;
    const int begin = block % plan.query_blocks * Tile::kQueries;
    for (int i = threadIdx.x; i < Tile::kQueries * kPieces; i += Tile::kThreads) {
      const int query = begin + i / kPieces, column = i % kPieces * kPiece;
      const bool valid = query < pair.queries && column < p.cache.head_size;
      const int64_t row = (pair.first + query) % static_cast<int32_t>(p.window_rows);
      const int64_t offset =
          ((pair.sequence * p.window_rows + row) * p.num_heads + head) * p.cache.head_size + column;
      copy_async_16(queries(block) + i / kPieces * Tile::kStride + column, source + (valid ? offset : 0),
                    valid);
    }
  }

  // Brings keys and the first queries in; `body(block, products)` is called for each block of queries in
  // turn.
  template <typename Body>
  __device__ __forceinline__ void for_each_query_block(int32_t first_key, Body&& body) const {
    load_keys(first_key);
    load_queries(0);
    copy_async_commit();
    for (int block = 0; block < blocks(); ++block) {
      if (block + 1 < blocks()) load_queries(block + 1);
      copy_async_commit();
      copy_async_wait<1>();
      __syncthreads();
      Products z = {};
      multiply(z, queries(block));
      finish(z);
      body(block, z);
      __syncthreads();
    }
  }

  __device__ __forceinline__ void multiply(Products& z, const Element* query_rows) const {
    if constexpr (sizeof(Element) == 4) {
      for (int column = 0; column < p.cache.head_size; ++column)
#pragma unroll
        for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            z[n][e] = fmaf(shared[(warp() * 16 + lane() / 4 + e / 2 * 8) * Tile::kStride + column],
                           query_rows[(n * 8 + lane() % 4 * 2 + e % 2) * Tile::kStride + column], z[n][e]);
    } else {
      const uint32_t key_address =
          shared_address(shared + (warp() * 16 + lane() % 16) * Tile::kStride + lane() / 16 * 8);
      const uint32_t query_address =
          shared_address(query_rows + (lane() / 16 * 8 + lane() % 8) * Tile::kStride + lane() / 8 % 2 * 8);
#pragma unroll
      for (int k = 0; k < kHeadSize / 16; ++k) {
        uint32_t key[4];
        load_matrix_x4(key, key_address + k * 32);
#pragma unroll
        for (int n = 0; n < kQueryTiles / 2; ++n) {
          uint32_t query[4];
          load_matrix_x4(query, query_address + (n * 16 * Tile::kStride + k * 16) * 2);
          Half<Element>::multiply_add(z[2 * n], key, query[0], query[1]);
          Half<Element>::multiply_add(z[2 * n + 1], key, query[2], query[3]);
        }
      }
    }
  }

  // Products to logits in units of log2.
  __device__ __forceinline__ void finish(Products& z) const {
    const Logits logits = Logits::of(p.scale, p.softcap);
#pragma unroll
    for (int n = 0; n < kQueryTiles * 4; ++n) {
      float& logit = z[n / 4][n % 4];
      if (!logits.mapped)
        logit *= logits.factor;
      else if (sizeof(Element) == 4 && p.softcap > 0)
        logit = p.softcap * tanhf(logit * p.scale / p.softcap) * kLog2E;
      else
        logit = logits.map(logit);
    }
  }
};

__device__ __forceinline__ SoftmaxState merged(SoftmaxState a, SoftmaxState b) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  const float base = finite_max(maximum);
  return {maximum, fmaf(a.sum, fast_exp2(a.maximum - base), b.sum * fast_exp2(b.maximum - base))};
}

template <typename Element, int kHeadSize>
__global__ void __launch_bounds__(ScoreTile<Element, kHeadSize>::kThreads)
    score_states_kernel(const __grid_constant__ SnapKvScoreParams p, const __grid_constant__ ScorePlan plan) {
  using Block = ScoreBlock<Element, kHeadSize>;
  using Tile = typename Block::Tile;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ SoftmaxState warp_states[Tile::kWarps][Tile::kQueries];
  auto* states = reinterpret_cast<SoftmaxState*>(shared_memory + Tile::kSharedBytes);  // [rows]
  wait_for_previous_kernel();
  const ScorePair pair = ScorePair::of(p, blockIdx.y);
  const Block block{p, plan, pair, reinterpret_cast<Element*>(shared_memory)};
  const int lane = block.lane();
  for (int i = threadIdx.x; i < plan.rows; i += Tile::kThreads) states[i] = {-INFINITY, 0.0f};
  __syncthreads();

  const int64_t begin = int64_t{blockIdx.x} * plan.tiles_per_span * Tile::kKeys;
  const int64_t end = begin + plan.tiles_per_span * Tile::kKeys;
  for (int64_t first = begin; first < end && first < pair.length; first += Tile::kKeys) {
    block.for_each_query_block(
        static_cast<int32_t>(first), [&](int query_block, typename Block::Products& z) {
          const int32_t key = static_cast<int32_t>(first) + block.warp() * 16 + lane / 4;
          const int32_t query = pair.first + query_block % plan.query_blocks * Tile::kQueries + lane % 4 * 2;
#pragma unroll
          for (int n = 0; n < Block::kQueryTiles; ++n)
#pragma unroll
            for (int column = 0; column < 2; ++column) {
              const int32_t last = query + n * 8 + column;  // the newest key that the query sees
              const float low = key <= last && key < pair.length ? z[n][column] : -INFINITY;
              const float high = key + 8 <= last && key + 8 < pair.length ? z[n][2 + column] : -INFINITY;
              SoftmaxState state;
              state.maximum = fmaxf(low, high);
#pragma unroll
              for (int step = 4; step < 32; step *= 2)
                state.maximum = fmaxf(state.maximum, __shfl_xor_sync(~0u, state.maximum, step));
              const float base = finite_max(state.maximum);
              state.sum = fast_exp2(low - base) + fast_exp2(high - base);
#pragma unroll
              for (int step = 4; step < 32; step *= 2) state.sum += __shfl_xor_sync(~0u, state.sum, step);
              if (lane < 4) warp_states[block.warp()][n * 8 + lane * 2 + column] = state;
            }
          __syncthreads();
          if (threadIdx.x < Tile::kQueries) {
            SoftmaxState& state = states[query_block * Tile::kQueries + threadIdx.x];
#pragma unroll
            for (int w = 0; w < Tile::kWarps; ++w) state = merged(state, warp_states[w][threadIdx.x]);
          }
        });
  }
  __syncthreads();
  SoftmaxState* target = plan.partials + (int64_t{blockIdx.y} * plan.spans + blockIdx.x) * plan.rows;
  for (int i = threadIdx.x; i < plan.rows; i += Tile::kThreads) target[i] = states[i];
}

template <typename Element, int kHeadSize>
__global__ void __launch_bounds__(ScoreTile<Element, kHeadSize>::kThreads)
    score_sums_kernel(const __grid_constant__ SnapKvScoreParams p, const __grid_constant__ ScorePlan plan) {
  using Block = ScoreBlock<Element, kHeadSize>;
  using Tile = typename Block::Tile;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_for_previous_kernel();
  const ScorePair pair = ScorePair::of(p, blockIdx.y);
  const Block block{p, plan, pair, reinterpret_cast<Element*>(shared_memory)};
  const int lane = block.lane();
  const int64_t first = int64_t{blockIdx.x} * Tile::kKeys;
  float results[2] = {};  // of keys lane / 4 and + 8
  if (first < pair.first) {
    const SoftmaxState* states = plan.states + int64_t{blockIdx.y} * plan.rows;
    float sums[2] = {};
    block.for_each_query_block(static_cast<int32_t>(first), [&](int query_block,
                                                                typename Block::Products& z) {
#pragma unroll
      for (int n = 0; n < Block::kQueryTiles; ++n)
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const SoftmaxState state = states[query_block * Tile::kQueries + n * 8 + lane % 4 * 2 + column];
          sums[0] = fmaf(fast_exp2(z[n][column] - state.maximum), state.sum, sums[0]);
          sums[1] = fmaf(fast_exp2(z[n][2 + column] - state.maximum), state.sum, sums[1]);
        }
      if ((query_block + 1) % plan.query_blocks) return;  // the head goes on
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = sums[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        results[half] = p.group_reduce == GroupReduce::kMax ? fmaxf(results[half], sum) : results[half] + sum;
        sums[half] = 0;
      }
    });
  }
  const float heads = p.group_reduce == GroupReduce::kMean ? static_cast<float>(plan.group) : 1.0f;
  const float divisor = heads * static_cast<float>(max(pair.queries, 1));
  float* score = p.score + int64_t{blockIdx.y} * p.cache.capacity;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t key = first + block.warp() * 16 + lane / 4 + half * 8;
    if (lane % 4 == 0 && key < p.cache.capacity)
      score[key] = key < pair.first ? results[half] / divisor : 0.0f;
  }
}

}  // namespace ortolan::cuda
