// SnapKvScore on sm_90a: the two passes of mma.cuh, with products by wgmma.
//
// A block keeps the captured queries of one kv head's group in shared memory and walks every `spans`-th tile
// of 128 keys, which a warp of its own brings, as tensor copies where rows are adjacent. First pass: 64
// queries of a head against a tile; two warpgroups share the heads, and a thread keeps the softmax state of
// what it saw. Second pass: 64 keys of a tile against the queries of two heads at a time; sums over queries
// stay inside a thread. All orders of additions follow from shapes and kv_len. Source: SnapKV, arXiv
// 2404.14469, section 4.
#pragma once

#include "kernels/cuda/common/packed_rows.cuh"
#include "kernels/cuda/common/tile_copy_sm90.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "plan.cuh"

namespace ortolan::cuda {

template <int kHeadSize>
struct ScoreSm90Shape {
  static constexpr int kQueries = 64;  // of a head
  static constexpr int kKeys = 128;    // of a tile
  static constexpr int kMostHeads = 8;
  static constexpr int kGroups = 2;  // warpgroups that compute
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kTileBytes = kKeys * kHeadSize * 2;
  static constexpr int kStages = kHeadSize == 64 ? 4 : 2;

  // Heads are taken in pairs: the rows of one that is missing are zeros.
  static __host__ __device__ constexpr int query_rows(int heads) { return (heads + 1) / 2 * 2 * kQueries; }
  static __host__ __device__ constexpr int shared_bytes(int heads) {
    return query_rows(heads) * (kHeadSize * 2 + static_cast<int>(sizeof(SoftmaxState))) +
           kStages * kTileBytes + 1024;
  }
};

struct ScoreSm90Map {
  CUtensorMap keys;  // [N * Hkv, P, D], boxes of box_rows slots
  int box_rows;
};

// What a block of either pass does before its roles part, and its loading warp.
template <typename Element, int kHeadSize>
struct ScoreSm90Block {
  using Shape = ScoreSm90Shape<kHeadSize>;
  using KeyRing = Ring<Shape::kStages>;
  const SnapKvScoreParams& p;
  const ScorePlan& plan;
  Handover<Shape::kStages>& handover;
  ScorePair pair;
  uint32_t queries;  // shared addresses
  uint32_t keys;
  SoftmaxState* states;  // [query_rows], shared

  __device__ __forceinline__ ScoreSm90Block(const SnapKvScoreParams& p, const ScorePlan& plan,
                                            Handover<Shape::kStages>& handover, unsigned char* memory)
      : p(p), plan(plan), handover(handover) {
    const uint32_t begin = shared_address(memory), aligned = (begin + 1023) & ~1023u;
    const int rows = Shape::query_rows(plan.group);
    queries = aligned;
    keys = queries + rows * kHeadSize * 2;
    states = reinterpret_cast<SoftmaxState*>(memory + (keys + Shape::kStages * Shape::kTileBytes - begin));
    if (threadIdx.x == 0) {
      handover.init(Shape::kGroups * 4);
      fence_async_proxy();
    }
    wait_for_previous_kernel();
    launch_dependents();
    pair = ScorePair::of(p, blockIdx.y);
  }

  // Tile n of this block.
  __device__ __forceinline__ int32_t tile(int n) const { return blockIdx.x + n * plan.spans; }
  // Tiles of this block that begin before `end`.
  __device__ __forceinline__ int tiles_before(int32_t end) const {
    const int32_t all = (end + Shape::kKeys - 1) / Shape::kKeys - static_cast<int32_t>(blockIdx.x);
    return all > 0 ? (all + plan.spans - 1) / plan.spans : 0;
  }

  // For the whole block, which meets at the end.
  __device__ __forceinline__ void load_queries() const {
    constexpr int kPieces = kHeadSize / 8;
    const int rows = Shape::query_rows(plan.group);
    const auto* source = static_cast<const Element*>(p.capture);
    for (int i = threadIdx.x; i < rows * kPieces; i += Shape::kThreads) {
      const int row = i / kPieces, piece = i % kPieces;
      const int head = row / Shape::kQueries, query = row % Shape::kQueries;
      const bool exists = head < plan.group && query < pair.queries;
      copy_async_16(swizzled_place(queries, rows, row, piece),
                    source + (exists ? pair.query_offset(p, plan, head, query) + piece * 8 : 0), exists);
    }
    copy_async_commit();
    copy_async_wait<0>();
    fence_async_proxy();
    __syncthreads();
  }

  __device__ __forceinline__ void bring_keys(const ScoreSm90Map& map, int tiles) const {
    const Sm90TileCopy<Element, kHeadSize, Shape::kKeys> copy{p.cache, pair.sequence, pair.kv_head,
                                                              pair.length, map.box_rows};
    KeyRing at;
    for (int n = 0; n < tiles; ++n, at.advance()) {
      handover.wait_empty(at);
      copy.start(keys + at.place * Shape::kTileBytes, map.keys, p.key_cache, tile(n) * Shape::kKeys,
                 handover.full[at.place]);
    }
  }

  // z[64 x 128] = a rows * b rows; both lie in tiles of a_rows and b_rows rows.
  static __device__ __forceinline__ void multiply(float (&z)[64], uint32_t a, int a_rows, uint32_t b,
                                                  int b_rows) {
    const uint64_t a_tile = wgmma_tile(a, 16), b_tile = wgmma_tile(b, 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; ++k)
      Wgmma<Element, 128>::products(z, moved_tile(a_tile, k / 4 * a_rows * 128 + k % 4 * 32),
                                    moved_tile(b_tile, k / 4 * b_rows * 128 + k % 4 * 32), k > 0);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < 64; ++n) asm volatile("" : "+f"(z[n])::"memory");
  }
};

// The softmax states of two rows over the keys that one thread has seen; maxima are not multiplied with the
// factor. What is subtracted is the rounded product everywhere, so that states which meet agree to the last
// bit.
struct ScoreRowPair {
  float maxima[2] = {-1e36f, -1e36f};  // finite, so that they can be subtracted
  float sums[2] = {};

  __device__ __forceinline__ void add(const float (&z)[64], float factor) {
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest[2] = {maxima[half], maxima[half]};
#pragma unroll
      for (int n = 0; n < 16; ++n)
        largest[n % 2] = fmaxf(largest[n % 2], fmaxf(z[4 * n + 2 * half], z[4 * n + 2 * half + 1]));
      const float maximum = fmaxf(largest[0], largest[1]);
      base[half] = __fmul_rn(maximum, factor);
      sums[half] *= fast_exp2(__fmul_rn(maxima[half], factor) - base[half]);
      maxima[half] = maximum;
    }
    float added[2][2] = {};
#pragma unroll
    for (int n = 0; n < 64; ++n) added[n / 2 % 2][n % 2] += fast_exp2(fmaf(z[n], factor, -base[n / 2 % 2]));
#pragma unroll
    for (int half = 0; half < 2; ++half) sums[half] += added[half][0] + added[half][1];
  }
};

// Grid: (spans, sequences * kv heads). kHeads: heads of a warpgroup, at most.
template <typename Element, int kHeadSize, int kHeads>
__global__ void __launch_bounds__(ScoreSm90Shape<kHeadSize>::kThreads, 1)
    score_states_sm90_kernel(const __grid_constant__ SnapKvScoreParams p,
                             const __grid_constant__ ScorePlan plan,
                             const __grid_constant__ ScoreSm90Map map) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = ScoreSm90Shape<kHeadSize>;
  using Block = ScoreSm90Block<Element, kHeadSize>;
  extern __shared__ unsigned char shared_memory[];
  __shared__ Handover<Shape::kStages> handover;
  const Block block(p, plan, handover, shared_memory);
  const ScorePair& pair = block.pair;
  block.load_queries();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
  const int tiles = block.tiles_before(pair.length);
  if (group == Shape::kGroups) {
    if (threadIdx.x / 32 % 4 == 0) block.bring_keys(map, tiles);
    return;
  }

  const Logits logits = Logits::of(p.scale, p.softcap);
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  const int rows = Shape::query_rows(plan.group);
  ScoreRowPair running[kHeads];
  typename Block::KeyRing at;
  for (int n = 0; n < tiles; ++n) {
    const int32_t first = block.tile(n) * Shape::kKeys;
    const bool hides = first + Shape::kKeys - 1 > pair.first;  // some key from some query
    handover.wait_full(at);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int head = h * Shape::kGroups + group;
      if (head >= plan.group) break;
      float z[64];
      Block::multiply(z, block.queries + head * Shape::kQueries * 128, rows,
                      block.keys + at.place * Shape::kTileBytes, Shape::kKeys);
      if (logits.mapped) logits.map(z);
      if (hides) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          const int32_t last = min(pair.first + row + i / 2 % 2 * 8, pair.length - 1);
          if (first + i / 4 * 8 + column + i % 2 > last) z[i] = -INFINITY;
        }
      }
      running[h].add(z, logits.factor);
    }
    handover.release(at);
  }

  SoftmaxState* target = plan.partials + (int64_t{blockIdx.y} * plan.spans + blockIdx.x) * plan.rows;
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const SoftmaxState state =
          merged_quad({__fmul_rn(running[h].maxima[half], logits.factor), running[h].sums[half]});
      const int head = h * Shape::kGroups + group;
      if (threadIdx.x % 4 == 0 && head < plan.group) target[head * Shape::kQueries + row + half * 8] = state;
    }
#else
  refuse_architecture();
#endif
}

// Grid: (spans, sequences * kv heads).
template <typename Element, int kHeadSize, QueryReduce kReduce>
__global__ void __launch_bounds__(ScoreSm90Shape<kHeadSize>::kThreads, 1)
    score_sums_sm90_kernel(const __grid_constant__ SnapKvScoreParams p,
                           const __grid_constant__ ScorePlan plan, const __grid_constant__ ScoreSm90Map map) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = ScoreSm90Shape<kHeadSize>;
  using Block = ScoreSm90Block<Element, kHeadSize>;
  extern __shared__ unsigned char shared_memory[];
  __shared__ Handover<Shape::kStages> handover;
  const Block block(p, plan, handover, shared_memory);
  const ScorePair& pair = block.pair;
  const int rows = Shape::query_rows(plan.group);
  for (int i = threadIdx.x; i < rows; i += Shape::kThreads)
    block.states[i] = i < plan.rows ? plan.states[int64_t{blockIdx.y} * plan.rows + i] : SoftmaxState{0, 0};
  block.load_queries();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
  const int tiles = block.tiles_before(pair.first);
  if (group == Shape::kGroups) {
    if (threadIdx.x / 32 % 4 == 0) block.bring_keys(map, tiles);
    return;
  }

  const Logits logits = Logits::of(p.scale, p.softcap);
  const int row = group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  float* score = p.score + int64_t{blockIdx.y} * p.cache.capacity;
  const auto store = [&](int32_t key, float value) {
    if (threadIdx.x % 4 == 0 && key < p.cache.capacity) score[key] = key < pair.first ? value : 0.0f;
  };
  using Weights = QueryWeights<kReduce>;
  typename Block::KeyRing at;
  for (int n = 0; n < tiles; ++n) {
    GroupWeights<kReduce> results[2] = {{p.group_reduce}, {p.group_reduce}};
    handover.wait_full(at);
#pragma unroll 1
    for (int head = 0; head < plan.group; head += 2) {
      float z[64];
      Block::multiply(z, block.keys + at.place * Shape::kTileBytes + group * 64 * 128, Shape::kKeys,
                      block.queries + head * Shape::kQueries * 128, rows);
      if (logits.mapped) logits.map(z);
      const auto* states = reinterpret_cast<const float4*>(block.states + head * Shape::kQueries + column);
#pragma unroll
      for (int part = 0; part < 2; ++part) {  // a head
        float sums[2] = {};
#pragma unroll
        for (int n = part * 8; n < part * 8 + 8; ++n) {
          const float4 state = states[n * 4];  // of two queries
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float* logit = z + 4 * n + 2 * half;
            sums[half] =
                Weights::joined(sums[half], fast_exp2(fmaf(logit[0], logits.factor, -state.x)), state.y);
            sums[half] =
                Weights::joined(sums[half], fast_exp2(fmaf(logit[1], logits.factor, -state.z)), state.w);
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float weight = Weights::of_quad(sums[half]);
          if (head + part < plan.group) results[half].add(weight);
        }
      }
    }
    handover.release(at);
    const int32_t key = block.tile(n) * Shape::kKeys + row;
    store(key, results[0].score(plan, pair));
    store(key + 8, results[1].score(plan, pair));
  }
  for (int n = tiles; block.tile(n) * Shape::kKeys < p.cache.capacity; ++n) {
    const int32_t key = block.tile(n) * Shape::kKeys + row;
    store(key, 0.0f);
    store(key + 8, 0.0f);
  }
#else
  refuse_architecture();
#endif
}

}  // namespace ortolan::cuda
