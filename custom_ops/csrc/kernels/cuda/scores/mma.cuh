// SnapKvScore of 16-bit elements, in two passes over the keys: each query's softmax state, then the sum, or
// the largest, of its probabilities per key.
//
// Both passes multiply rows that a warp holds in registers with rows that stream through shared memory, three
// tiles deep, and sum along the streamed rows inside a thread; threads meet once, at the end. First pass:
// held queries, streamed keys; grid (spans, sequences * kv heads, blocks of rows), where span s walks the
// tiles s, s + spans, ... and a fold merges the spans. Second pass: held keys, streamed queries with their
// states; grid (blocks of keys, sequences * kv heads).
//
// A thread loads 8 adjacent elements of a row at once, and gives them to two products as if they were the
// columns that the instruction expects of it: both sides permute columns alike, and a product does not see
// it. Every order of additions follows from shapes and kv_len: no atomics, equal runs give equal bits.
// Source: SnapKV, arXiv 2404.14469, section 4; the products' layout: PTX ISA, mma.m16n8k16.
#pragma once

#include "kernels/cuda/attention/key_rows.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "plan.cuh"

namespace ortolan::cuda {

template <int kHeadSize>
struct ScoreMmaTile {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kBlocks = kHeadSize <= 128 ? 2 : 1;  // per multiprocessor, as registers allow
  // Of 16 rows, held by a warp. Each streamed row is read from shared memory once for all of them.
  static constexpr int kRowTiles = kHeadSize <= 128 ? 2 : 1;
  static constexpr int kHeldRows = kWarps * kRowTiles * 16;
  static constexpr int kRows = kHeadSize <= 64 ? 128 : kHeadSize <= 128 ? 64 : 32;  // streamed at a time
  static constexpr int kStep = 32;  // streamed rows multiplied at a time
  static constexpr int kStages = 3;
  static constexpr int kRowBytes = kHeadSize * 2;
  static constexpr int kStateBytes = kRows * static_cast<int>(sizeof(SoftmaxState));
  static constexpr int kStageBytes = kRows * kRowBytes + kStateBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
};

template <typename Element, int kHeadSize>
struct ScoreMmaBlock {
  using Tile = ScoreMmaTile<kHeadSize>;
  static constexpr int kParts = kHeadSize / 32;    // of a row, two products each
  using Held = uint4[Tile::kRowTiles][kParts][2];  // rows lane / 4 and + 8, elements lane % 4 * 8 ...
  // Rows: held rows lane / 4 and + 8; columns: streamed rows lane % 4 * 2 and + 1.
  using Products = float[Tile::kRowTiles][Tile::kStep / 8][4];

  const SnapKvScoreParams& p;
  const ScorePlan& plan;
  ScorePair pair;
  unsigned char* shared;

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int held_row(int tile, int half) const {
    return (threadIdx.x / 32 * Tile::kRowTiles + tile) * 16 + half * 8 + lane() / 4;
  }
  __device__ __forceinline__ unsigned char* stage(int tile) const {
    return shared + tile % Tile::kStages * Tile::kStageBytes;
  }

  // `offset(row)` is where a held row lies, in elements; -1: it is zeros.
  template <typename Offset>
  __device__ __forceinline__ void hold(Held& held, const void* source, Offset&& offset) const {
#pragma unroll
    for (int t = 0; t < Tile::kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = offset(held_row(t, half));
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int column = part * 32 + lane() % 4 * 8;
          held[t][part][half] =
              row >= 0 && column < p.cache.head_size
                  ? *reinterpret_cast<const uint4*>(static_cast<const Element*>(source) + row + column)
                  : uint4{};
        }
      }
  }

  // Starts to copy a tile of rows. Halves of 128 bytes change places in odd rows, so that eight threads which
  // read two rows of 64 bytes meet no bank twice.
  template <typename Offset>
  __device__ __forceinline__ void copy_rows(int tile, const void* source, Offset&& offset) const {
    constexpr int kPieces = kHeadSize / 8;
    const uint32_t target = shared_address(stage(tile));
#pragma unroll 4
    for (int i = threadIdx.x; i < Tile::kRows * kPieces; i += Tile::kThreads) {
      const int row = i / kPieces, piece = i % kPieces;
      const int64_t begin = piece * 8 < p.cache.head_size ? offset(row) : -1;
      copy_async_16(target + row * Tile::kRowBytes + (piece ^ row % 2 * 4) * 16,
                    static_cast<const Element*>(source) + (begin >= 0 ? begin + piece * 8 : 0), begin >= 0);
    }
  }

  // Calls `copy(tile)` two tiles ahead, and `use(tile)` once a tile is there.
  template <typename Copy, typename Use>
  __device__ __forceinline__ void stream(int tiles, Copy&& copy, Use&& use) const {
#pragma unroll
    for (int tile = 0; tile < Tile::kStages - 1; ++tile) {
      if (tile < tiles) copy(tile);
      copy_async_commit();
    }
    for (int tile = 0; tile < tiles; ++tile) {
      copy_async_wait<Tile::kStages - 2>();
      __syncthreads();
      if (tile + Tile::kStages - 1 < tiles) copy(tile + Tile::kStages - 1);
      copy_async_commit();
      use(tile);
    }
  }

  // Logits of the held rows and the kStep streamed rows from `first_row` of a tile on, in units of log2 once
  // they are multiplied with `logits.factor`.
  __device__ __forceinline__ void multiply(Products& z, const Held& held, const Logits& logits, int tile,
                                           int first_row) const {
    const int row = lane() / 4;
    const unsigned char* rows = stage(tile) + (first_row + row) * Tile::kRowBytes + lane() % 4 * 16;
    const unsigned char* parts[2] = {rows + row % 2 * 64, rows - row % 2 * 64};  // even, odd
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int n = 0; n < Tile::kStep / 8; ++n) {
        const uint4 streamed =
            *reinterpret_cast<const uint4*>(parts[part % 2] + n * 8 * Tile::kRowBytes + part * 64);
#pragma unroll
        for (int t = 0; t < Tile::kRowTiles; ++t) {
          const uint4 low = held[t][part][0], high = held[t][part][1];
          const uint32_t first[4] = {low.x, high.x, low.y, high.y};
          const uint32_t second[4] = {low.z, high.z, low.w, high.w};
          Half<Element>::multiply_add(z[t][n], first, streamed.x, streamed.y);
          Half<Element>::multiply_add(z[t][n], second, streamed.z, streamed.w);
        }
      }
    if (!logits.mapped) return;
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles * Tile::kStep / 2; ++i) {
      float& logit = z[i / (Tile::kStep / 2)][i / 4 % (Tile::kStep / 8)][i % 4];
      logit = logits.map(logit);
    }
  }
};

// A row's softmax state over the keys that one thread has seen; `maximum` is not multiplied with the factor.
// What is subtracted is the rounded product everywhere, so that states which meet agree to the last bit.
struct RunningState {
  float maximum = -1e36f;  // finite, so that it can be subtracted
  float sum = 0;

  template <int kValues>
  __device__ __forceinline__ void add(const float (&values)[kValues], float factor) {
    float largest = maximum;
#pragma unroll
    for (int i = 0; i < kValues; ++i) largest = fmaxf(largest, values[i]);
    const float base = __fmul_rn(largest, factor);
    float added = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) added += fast_exp2(fmaf(values[i], factor, -base));
    sum = fmaf(sum, fast_exp2(__fmul_rn(maximum, factor) - base), added);
    maximum = largest;
  }
};

template <typename Element, int kHeadSize>
__global__ void __launch_bounds__(ScoreMmaTile<kHeadSize>::kThreads, ScoreMmaTile<kHeadSize>::kBlocks)
    score_states_mma_kernel(const __grid_constant__ SnapKvScoreParams p,
                            const __grid_constant__ ScorePlan plan) {
  using Block = ScoreMmaBlock<Element, kHeadSize>;
  using Tile = typename Block::Tile;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_for_previous_kernel();
  const Block block{p, plan, ScorePair::of(p, blockIdx.y), shared_memory};
  const ScorePair& pair = block.pair;
  const Logits logits = Logits::of(p.scale, p.softcap);
  const KeyRows keys(p.cache, pair.sequence, pair.kv_head);
  const int first_row = blockIdx.z * Tile::kHeldRows;

  typename Block::Held held;
  block.hold(held, p.capture, [&](int row) -> int64_t {
    const int head = (first_row + row) / plan.query_rows, query = (first_row + row) % plan.query_rows;
    return head < plan.group && query < pair.queries ? pair.query_offset(p, plan, head, query) : -1;
  });
  RunningState running[Tile::kRowTiles][2];
  const auto first_key = [&](int tile) {
    return static_cast<int32_t>((int64_t{blockIdx.x} + int64_t{tile} * plan.spans) * Tile::kRows);
  };
  const auto copy = [&](int tile) {
    const int32_t first = first_key(tile);
    block.copy_rows(tile, p.key_cache, [&](int row) -> int64_t {
      return first + row < pair.length ? keys.offset(first + row) : -1;
    });
  };
  const int all_tiles = (pair.length + Tile::kRows - 1) / Tile::kRows;
  const int tiles = (all_tiles - static_cast<int>(blockIdx.x) + plan.spans - 1) / plan.spans;
  block.stream(max(tiles, 0), copy, [&](int tile) {
#pragma unroll 1
    for (int step = 0; step < Tile::kRows; step += Tile::kStep) {
      const int32_t key = first_key(tile) + step;
      if (key >= pair.length) break;
      typename Block::Products z = {};
      block.multiply(z, held, logits, tile, step);
      const bool hides = key + Tile::kStep - 1 > pair.first;  // some key from some query
#pragma unroll
      for (int t = 0; t < Tile::kRowTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float values[Tile::kStep / 4];
#pragma unroll
          for (int i = 0; i < Tile::kStep / 4; ++i) values[i] = z[t][i / 2][half * 2 + i % 2];
          if (hides) {
            const int query = (first_row + block.held_row(t, half)) % plan.query_rows;
            const int32_t last = min(pair.first + query, pair.length - 1) - key - block.lane() % 4 * 2;
#pragma unroll
            for (int i = 0; i < Tile::kStep / 4; ++i)
              if (i / 2 * 8 + i % 2 > last) values[i] = -INFINITY;
          }
          running[t][half].add(values, logits.factor);
        }
    }
  });

  SoftmaxState* target = plan.partials + (int64_t{blockIdx.y} * plan.spans + blockIdx.x) * plan.rows;
#pragma unroll
  for (int t = 0; t < Tile::kRowTiles; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const SoftmaxState state =
          merged_quad({__fmul_rn(running[t][half].maximum, logits.factor), running[t][half].sum});
      const int row = first_row + block.held_row(t, half);
      if (block.lane() % 4 == 0 && row < plan.rows) target[row] = state;
    }
}

template <typename Element, int kHeadSize, QueryReduce kReduce>
__global__ void __launch_bounds__(ScoreMmaTile<kHeadSize>::kThreads, ScoreMmaTile<kHeadSize>::kBlocks)
    score_sums_mma_kernel(const __grid_constant__ SnapKvScoreParams p,
                          const __grid_constant__ ScorePlan plan) {
  using Block = ScoreMmaBlock<Element, kHeadSize>;
  using Tile = typename Block::Tile;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  wait_for_previous_kernel();
  const Block block{p, plan, ScorePair::of(p, blockIdx.y), shared_memory};
  const ScorePair& pair = block.pair;
  const Logits logits = Logits::of(p.scale, p.softcap);
  const int64_t first_key = int64_t{blockIdx.x} * Tile::kHeldRows;
  const SoftmaxState* states = plan.states + int64_t{blockIdx.y} * plan.rows;

  float sums[Tile::kRowTiles][2] = {};  // over the queries of one head
  using Weights = QueryWeights<kReduce>;
  GroupWeights<kReduce> results[Tile::kRowTiles][2];
#pragma unroll
  for (int i = 0; i < Tile::kRowTiles * 2; ++i) results[i / 2][i % 2].reduce = p.group_reduce;
  const auto copy = [&](int tile) {
    const int first = tile * Tile::kRows;
    block.copy_rows(tile, p.capture, [&](int row) -> int64_t {
      const int head = (first + row) / plan.query_rows, query = (first + row) % plan.query_rows;
      return head < plan.group && query < pair.queries ? pair.query_offset(p, plan, head, query) : -1;
    });
    const int row = threadIdx.x * 2;
    if (row < Tile::kRows)
      copy_async_16(block.stage(tile) + Tile::kRows * Tile::kRowBytes + row * sizeof(SoftmaxState),
                    states + (first + row < plan.rows ? first + row : 0), first + row < plan.rows);
  };
  if (first_key < pair.first) {
    typename Block::Held held;
    const KeyRows keys(p.cache, pair.sequence, pair.kv_head);
    block.hold(held, p.key_cache, [&](int row) -> int64_t {
      return first_key + row < pair.first ? keys.offset(static_cast<int32_t>(first_key + row)) : -1;
    });
    block.stream((plan.rows + Tile::kRows - 1) / Tile::kRows, copy, [&](int tile) {
      const auto* tile_states =
          reinterpret_cast<const float4*>(block.stage(tile) + Tile::kRows * Tile::kRowBytes);
#pragma unroll 1
      for (int step = 0; step < Tile::kRows && tile * Tile::kRows + step < plan.rows; step += Tile::kStep) {
        typename Block::Products z = {};
        block.multiply(z, held, logits, tile, step);
#pragma unroll
        for (int n = 0; n < Tile::kStep / 8; ++n) {
          const float4 state = tile_states[step / 2 + n * 4 + block.lane() % 4];  // of two queries
#pragma unroll
          for (int t = 0; t < Tile::kRowTiles; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float& sum = sums[t][half];
              const float* logit = z[t][n] + half * 2;
              sum = Weights::joined(sum, fast_exp2(fmaf(logit[0], logits.factor, -state.x)), state.y);
              sum = Weights::joined(sum, fast_exp2(fmaf(logit[1], logits.factor, -state.z)), state.w);
            }
        }
        if ((tile * Tile::kRows + step + Tile::kStep) % plan.query_rows) continue;  // the head goes on
#pragma unroll
        for (int i = 0; i < Tile::kRowTiles * 2; ++i) {
          results[i / 2][i % 2].add(Weights::of_quad(sums[i / 2][i % 2]));
          sums[i / 2][i % 2] = 0;
        }
      }
    });
  }
  float* score = p.score + int64_t{blockIdx.y} * p.cache.capacity;
#pragma unroll
  for (int i = 0; i < Tile::kRowTiles * 2; ++i) {
    const int64_t key = first_key + block.held_row(i / 2, i % 2);
    if (block.lane() % 4 == 0 && key < p.cache.capacity)
      score[key] = key < pair.first ? results[i / 2][i % 2].score(plan, pair) : 0.0f;
  }
}

}  // namespace ortolan::cuda
