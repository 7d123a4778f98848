// SnapKvScore of float32 elements on the CUDA cores, in two passes over the keys: each query's softmax state,
// then the sum, or the largest, of its probabilities per key.
//
// A warp multiplies 16 keys with the queries of one head, `kQueries` at a time, which wait in shared memory:
// a key's sum over queries stays inside four threads. First pass, grid (spans, sequences * kv heads, shares
// of the queries): a block walks the tiles of its span and keeps the (maximum, sum) of each query of its
// share in shared memory; a fold merges the spans. Second pass, grid (tiles, sequences * kv heads):
// probabilities, their sum over queries, the group's reduction. Every order of additions follows from shapes
// and kv_len: no atomics, equal runs give equal bits. Source: SnapKV, arXiv 2404.14469, section 4.
#pragma once

#include "kernels/cuda/attention/key_rows.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "plan.cuh"

namespace ortolan::cuda {

// Tiles such that keys, two blocks of queries and the states of one fit 99 KiB, what every GPU since sm_80
// gives a block.
template <int kHeadSize>
struct ScoreFloatTile {
  static constexpr int kRowBytes = kHeadSize * static_cast<int>(sizeof(float));
  static constexpr int kWarps = kRowBytes <= 256 ? 8 : kRowBytes <= 1024 ? 4 : 2;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kKeys = kWarps * 16;
  static constexpr int kQueries = kRowBytes <= 512 ? 32 : kRowBytes <= 1024 ? 16 : 8;
  static constexpr int kStride = kHeadSize + 4;
  static constexpr int kSharedBytes = (kKeys + 2 * kQueries) * kStride * static_cast<int>(sizeof(float));
  static constexpr int kStateBytes = static_cast<int>(sizeof(SoftmaxState));
  static constexpr int kWarpStateBytes = kWarps * kQueries * kStateBytes;
  static_assert(kSharedBytes + kWarpStateBytes + kQueries * kStateBytes <= 99 << 10);

  // Parts that the first pass cuts its queries into: as few as leave room for their states.
  static int shares(const ScorePlan& plan, int shared_bytes_per_block) {
    const int room = (shared_bytes_per_block - kSharedBytes - kWarpStateBytes) / (kQueries * kStateBytes);
    return (plan.rows / kQueries + room - 1) / room;
  }
  // Of one part at most.
  static int rows(const ScorePlan& plan, int shares) {
    return (plan.rows / kQueries + shares - 1) / shares * kQueries;
  }
};

// Blocks of queries, begin .. end.
struct QueryBlocks {
  int begin;
  int end;
};

template <int kHeadSize>
struct ScoreFloatBlock {
  using Tile = ScoreFloatTile<kHeadSize>;
  static constexpr int kPiece = 4;  // elements of a 16-byte copy
  static constexpr int kPieces = kHeadSize / kPiece;
  static constexpr int kQueryTiles = Tile::kQueries / 8;
  using Products =
      float[kQueryTiles][4];  // rows: keys lane / 4 and + 8; columns: queries lane % 4 * 2 and + 1

  const SnapKvScoreParams& p;
  const ScorePlan& plan;
  ScorePair pair;
  float* shared;

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int blocks() const { return plan.rows / Tile::kQueries; }
  __device__ __forceinline__ float* queries(int block) const {
    return shared + (Tile::kKeys + block % 2 * Tile::kQueries) * Tile::kStride;
  }

  __device__ __forceinline__ void load_keys(int32_t first) const {
    const auto* source = static_cast<const float*>(p.key_cache);
    const KeyRows rows(p.cache, pair.sequence, pair.kv_head);
    for (int i = threadIdx.x; i < Tile::kKeys * kPieces; i += Tile::kThreads) {
      const int row = i / kPieces, column = i % kPieces * kPiece;
      const bool valid = first + row < pair.length && column < p.cache.head_size;
      copy_async_16(shared + row * Tile::kStride + column,
                    source + (valid ? rows.offset(first + row) + column : 0), valid);
    }
  }

  __device__ __forceinline__ void load_queries(int block) const {
    const auto* source = static_cast<const float*>(p.capture);
    const int head = block * Tile::kQueries / plan.query_rows;
    const int begin = block * Tile::kQueries % plan.query_rows;
    for (int i = threadIdx.x; i < Tile::kQueries * kPieces; i += Tile::kThreads) {
      const int query = begin + i / kPieces, column = i % kPieces * kPiece;
      const bool valid = query < pair.queries && column < p.cache.head_size;
      copy_async_16(queries(block) + i / kPieces * Tile::kStride + column,
                    source + (valid ? pair.query_offset(p, plan, head, query) + column : 0), valid);
    }
  }

  // Brings keys and the first queries in; `body(block, products)` is called for each block of queries in
  // turn.
  template <typename Body>
  __device__ __forceinline__ void for_each_query_block(int32_t first_key, QueryBlocks of, Body&& body) const {
    load_keys(first_key);
    load_queries(of.begin);
    copy_async_commit();
    for (int block = of.begin; block < of.end; ++block) {
      if (block + 1 < of.end) load_queries(block + 1);
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

  __device__ __forceinline__ void multiply(Products& z, const float* query_rows) const {
    for (int column = 0; column < p.cache.head_size; ++column)
#pragma unroll
      for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          z[n][e] = fmaf(shared[(warp() * 16 + lane() / 4 + e / 2 * 8) * Tile::kStride + column],
                         query_rows[(n * 8 + lane() % 4 * 2 + e % 2) * Tile::kStride + column], z[n][e]);
  }

  // Products to logits in units of log2.
  __device__ __forceinline__ void finish(Products& z) const {
    const Logits logits = Logits::of(p.scale, p.softcap);
#pragma unroll
    for (int n = 0; n < kQueryTiles * 4; ++n) {
      float& logit = z[n / 4][n % 4];
      if (!logits.mapped)
        logit *= logits.factor;
      else if (p.softcap > 0)
        logit = p.softcap * tanhf(logit * p.scale / p.softcap) * kLog2E;
      else
        logit = logits.map(logit);
    }
  }
};

template <int kHeadSize>
__global__ void __launch_bounds__(ScoreFloatTile<kHeadSize>::kThreads)
    score_states_float_kernel(const __grid_constant__ SnapKvScoreParams p,
                              const __grid_constant__ ScorePlan plan) {
  using Block = ScoreFloatBlock<kHeadSize>;
  using Tile = typename Block::Tile;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ SoftmaxState warp_states[Tile::kWarps][Tile::kQueries];
  wait_for_previous_kernel();
  const ScorePair pair = ScorePair::of(p, blockIdx.y);
  const Block block{p, plan, pair, reinterpret_cast<float*>(shared_memory)};
  const int lane = block.lane();
  const auto share = static_cast<int>(blockIdx.z), shares = static_cast<int>(gridDim.z);
  const QueryBlocks own{block.blocks() * share / shares, block.blocks() * (share + 1) / shares};
  const int first_row = own.begin * Tile::kQueries, end_row = own.end * Tile::kQueries;
  // By number of the row, of which the share's have a place.
  auto* states = reinterpret_cast<SoftmaxState*>(shared_memory + Tile::kSharedBytes) - first_row;
  for (int i = first_row + threadIdx.x; i < end_row; i += Tile::kThreads) states[i] = {-INFINITY, 0.0f};
  __syncthreads();

  const int64_t begin = int64_t{blockIdx.x} * plan.span_keys;
  const int64_t end = begin + plan.span_keys;
  for (int64_t first = begin; first < end && first < pair.length; first += Tile::kKeys) {
    block.for_each_query_block(
        static_cast<int32_t>(first), own, [&](int query_block, typename Block::Products& z) {
          const int32_t key = static_cast<int32_t>(first) + block.warp() * 16 + lane / 4;
          const int32_t query = pair.first + query_block * Tile::kQueries % plan.query_rows + lane % 4 * 2;
#pragma unroll
          for (int n = 0; n < Block::kQueryTiles; ++n)
#pragma unroll
            for (int column = 0; column < 2; ++column) {
              const int32_t last = query + n * 8 + column;  // the newest key that the query sees
              const float low = key <= last && key < pair.length ? z[n][column] : -INFINITY;
              const float high = key + 8 <= last && key + 8 < pair.length ? z[n][2 + column] : -INFINITY;
              SoftmaxState state;
              state.maximum = fold_lanes<4, 16>(fmaxf(low, high), Max());
              const float base = finite_max(state.maximum);
              state.total = fold_lanes<4, 16>(fast_exp2(low - base) + fast_exp2(high - base), Add());
              if (lane < 4) warp_states[block.warp()][n * 8 + lane * 2 + column] = state;
            }
          __syncthreads();
          if (threadIdx.x < Tile::kQueries) {
            SoftmaxState& state = states[query_block * Tile::kQueries + threadIdx.x];
#pragma unroll
            for (int w = 0; w < Tile::kWarps; ++w)
              state = Merge::of(state, warp_states[w][threadIdx.x]).state;
          }
        });
  }
  __syncthreads();
  SoftmaxState* target = plan.partials + (int64_t{blockIdx.y} * plan.spans + blockIdx.x) * plan.rows;
  for (int i = first_row + threadIdx.x; i < end_row; i += Tile::kThreads) target[i] = states[i];
}

template <int kHeadSize, QueryReduce kReduce>
__global__ void __launch_bounds__(ScoreFloatTile<kHeadSize>::kThreads)
    score_sums_float_kernel(const __grid_constant__ SnapKvScoreParams p,
                            const __grid_constant__ ScorePlan plan) {
  using Block = ScoreFloatBlock<kHeadSize>;
  using Tile = typename Block::Tile;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_for_previous_kernel();
  const ScorePair pair = ScorePair::of(p, blockIdx.y);
  const Block block{p, plan, pair, reinterpret_cast<float*>(shared_memory)};
  const int lane = block.lane();
  const int64_t first = int64_t{blockIdx.x} * Tile::kKeys;
  using Weights = QueryWeights<kReduce>;
  GroupWeights<kReduce> results[2] = {{p.group_reduce}, {p.group_reduce}};  // of keys lane / 4 and + 8
  if (first < pair.first) {
    const SoftmaxState* states = plan.states + int64_t{blockIdx.y} * plan.rows;
    float sums[2] = {};
    block.for_each_query_block(
        static_cast<int32_t>(first), {0, block.blocks()}, [&](int query_block, typename Block::Products& z) {
#pragma unroll
          for (int n = 0; n < Block::kQueryTiles; ++n)
#pragma unroll
            for (int column = 0; column < 2; ++column) {
              const SoftmaxState state = states[query_block * Tile::kQueries + n * 8 + lane % 4 * 2 + column];
              sums[0] = Weights::joined(sums[0], fast_exp2(z[n][column] - state.maximum), state.total);
              sums[1] = Weights::joined(sums[1], fast_exp2(z[n][2 + column] - state.maximum), state.total);
            }
          if ((query_block + 1) * Tile::kQueries % plan.query_rows) return;  // the head goes on
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            results[half].add(Weights::of_quad(sums[half]));
            sums[half] = 0;
          }
        });
  }
  float* score = p.score + int64_t{blockIdx.y} * p.cache.capacity;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t key = first + block.warp() * 16 + lane / 4 + half * 8;
    if (lane % 4 == 0 && key < p.cache.capacity)
      score[key] = key < pair.first ? results[half].score(plan, pair) : 0.0f;
  }
}

}  // namespace ortolan::cuda
