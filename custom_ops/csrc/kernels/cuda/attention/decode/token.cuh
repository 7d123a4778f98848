// One token of one sequence, from the joint projection to attention's output: its heads are normalised and
// rotated, its key and value appended, and its queries attend, in one kernel.
//
// Grid: a cluster of blocks per kv head, which share its key tiles evenly. Keys of earlier tokens are on
// their way before the kernel in front, which makes the projection, has ended; the token's own go from shared
// memory to their place in a tile. Each warp loads what it multiplies, so that warps meet only for a tile's
// sums; these are sent to the blocks that merge them (received.cuh). Most instructions run once, and come
// through caches that weights stream through, too: short code is faster than unrolled code, so loops stay
// loops, and numbers have 32 bits. Heads, products and sums are those of QkvRopeAppend and of decode.cuh,
// with the same bits.
#pragma once

#include "kernels/cuda/copies/heads.cuh"
#include "token_merge.cuh"
#include "token_shared.cuh"
#include "warp.cuh"

namespace ortolan::cuda {

// A warp that multiplies its own keys of each of the block's tiles, or those that it shares with another:
// then each loads its columns, both multiply the keys, and each its columns of the values.
template <typename Rows, int kSharers>
struct TokenWarp : DecodeWarp<Rows, 1, kSharers> {
  using Base = DecodeWarp<Rows, 1, kSharers>;
  using Element = typename Rows::Element;
  using Stage = DecodeStage<Rows>;
  using Base::first_column, Base::kHeadSize, Base::kKeys, Base::lane, Base::params, Base::positions,
      Base::query, Base::shape, Base::warp;
  static constexpr int kChunks = kHeadSize / 8;  // 16-byte pieces of a row
  static constexpr int kOwnChunks = kChunks / kSharers;

  const TokenShared<Rows>& shared;
  uint64_t policy = evict_first_policy();

  __device__ __forceinline__ TokenWarp(const SwaAttentionParams& params, const DecodeShape& shape,
                                       const TokenShared<Rows>& shared)
      : Base{params,
             shape,
             shared,
             Logits::of(params.scale, params.softcap),
             static_cast<int>(threadIdx.x) / (32 * kSharers),
             static_cast<int>(threadIdx.x) % 32,
             static_cast<int>(threadIdx.x) / 32 % kSharers * Base::kColumns},
        shared(shared) {}

  __device__ __forceinline__ Barrier& loaded(bool is_values) const {
    return shared.loaded[is_values * shape.warps + warp];
  }
  // Of the warp's own rows.
  __device__ __forceinline__ uint32_t rows(bool is_values) const {
    return is_values ? this->values(0) : this->keys(0);
  }
  __device__ __forceinline__ int32_t first_key(const TokenLine& line, int tile) const {
    return line.own.tiles.at(tile) * shape.tile_keys + warp * kKeys;
  }

  // Starts to load the warp's keys of a tile, its values, or both, but for the token's own. Rows that it does
  // not see become zeros.
  __device__ __forceinline__ void load(const TokenLine& line, int tile, bool has_keys,
                                       bool has_values) const {
    static_assert(kOwnChunks <= 32 && kKeys <= 32);
    constexpr int kRows = 32 / kOwnChunks;  // that a warp copies at once
    constexpr int kUnroll = kRows > 1 ? 2 : 4;
    int32_t position = first_key(line, tile) + lane;
    const SeenPositions seen = line.own.seen();
    if (!seen.holds(position)) position += line.distance;
    const bool is_cached = lane < kKeys && seen.holds(position) && position != line.own.last_position;
    // Each lane finds one.
    const int32_t own = is_cached ? row_of(params.cache, shape.by_page, line.own.kv_head, position) : kNoRow;
    const int piece = first_column / 8 + lane % kOwnChunks;
    const auto* keys = static_cast<const Element*>(params.key_cache) + piece * 8;
    const auto* values = static_cast<const Element*>(params.value_cache) + piece * 8;
#pragma unroll kUnroll
    for (int row = lane / kOwnChunks; row < kKeys; row += kRows) {
      const int32_t number = __shfl_sync(~0u, own, row);
      const bool valid = number != kNoRow;
      const int64_t source = valid ? int64_t{number} * kHeadSize : 0;
      const int place = Stage::place(row, piece);
      if (has_keys) copy_async_16(rows(false) + place, keys + source, valid, policy);
      if (has_values) copy_async_16(rows(true) + place, values + source, valid, policy);
    }
    if (has_keys) loaded(false).arrive_after_copies();
    if (has_values) loaded(true).arrive_after_copies();
  }

  // Waits for them, and puts the token's own to its place, where the warp has it: its columns of the value,
  // but all of the key, as it multiplies all.
  __device__ __forceinline__ void wait(const TokenLine& line, int32_t first, uint32_t parity,
                                       bool is_values) const {
    loaded(is_values).wait(parity);
    const int row = line.own.last_position - line.distance - first;
    const int piece = is_values ? first_column / 8 + lane : lane;
    if (row >= 0 && row < kKeys && lane < (is_values ? kOwnChunks : kChunks))
      store_shared_16(rows(is_values) + Stage::place(row, piece),
                      load_shared_16(shared_address(shared.head(line.own.rows + is_values)) + piece * 16));
    __syncwarp();
  }

  __device__ __forceinline__ void take_queries(const TokenLine& line) {
    const int row = lane / 4;
    const int number = row < line.own.rows ? row : row - line.own.rows;
    const auto* head = reinterpret_cast<const uint32_t*>(shared.head(number)) + lane % 4;
#pragma unroll
    for (int k = 0; k < 2 * Base::kSteps; ++k)
      query[0][k / 2][k % 2] = row < line.summed.rows ? head[k * 4] : 0;
#pragma unroll
    for (int e = 0; e < 2; ++e)
      positions[0][e] =
          lane % 4 * 2 + e < line.own.rows ? line.own.last_position : line.summed.first_position;
  }

  // Sums a tile, and loads the next one, if there is one before `end`. Keys that no query sees are zeros, and
  // count nothing. `parity`: of the tile's barriers.
  __device__ __forceinline__ void sum_tile(const TokenLine& line, int tile, int end, uint32_t parity) const {
    const int32_t first = first_key(line, tile);
    const auto load_next = [&](bool is_values) {
      // All lanes have read what is overwritten; the keys are those of all sharers.
      if (kSharers == 1 || is_values)
        __syncwarp();
      else
        sync_warps<kSharers * 32>(1 + warp);
      if (tile + 1 < end) load(line, tile + 1, !is_values, is_values);
    };
    wait(line, first, parity, false);
    this->sum_keys(
        line.summed, first, 0, 0,
        [&] {
          load_next(false);
          wait(line, first, parity, true);
        },
        [&] { load_next(true); }, [] { __syncthreads(); });
    __syncthreads();
  }
};

// The token's heads of a kv head, by kLanes neighbouring threads each: queries, then the key and the value.
template <typename Rows>
struct TokenHeads {
  using Element = typename Rows::Element;
  static constexpr int kLanes = Rows::kHeadSize / 16;
  using Part = HeadPart<Element, 8, kLanes, 1>;

  const QkvRopeAppendParams& p;
  const TokenShared<Rows>& shared;
  const DecodeShape& shape;
  int kv_head;
  int group = shape.group;
  int lane = threadIdx.x % kLanes;

  // Calls visit(number) for the heads of the thread's lanes.
  template <typename Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
    for (int number = static_cast<int>(threadIdx.x) / kLanes; number < group + 2;
         number += blockDim.x / kLanes)
      visit(number);
  }
  // Normalises and rotates them, and leaves them in shared memory.
  __device__ __forceinline__ void prepare() const {
    each([&](int number) {
      const bool is_query = number < group, is_value = number == group + 1;
      const auto kv_heads = static_cast<int>(p.cache.num_kv_heads), heads = static_cast<int>(p.num_heads);
      const int head = is_query ? kv_head * group + number
                                : heads + kv_head + (is_value && !p.value_is_key ? kv_heads : 0);
      const void* weight = is_value ? nullptr : is_query ? p.query_norm_weight : p.key_norm_weight;
      const bool is_rotated = !is_value && p.rotary_pairs > 0;
      Part part, weight_part;
      Angles<8, kLanes, 1> angles;
      part.load(static_cast<const Element*>(p.qkv) + head * Rows::kHeadSize, p, lane);
      if (is_rotated) angles.load(p, 0, lane);
      if (weight) weight_part.load(static_cast<const Element*>(weight), p, lane);
      prepare_head<kLanes>(part, weight_part, angles, weight || (is_value && p.value_norm), weight,
                           is_rotated, p, lane);
      part.store(shared.head(number), p, lane);
    });
  }
  // Stores them once they are prepared: queries, by one block; the key and the value at their position, by
  // one that may be another.
  __device__ __forceinline__ void store(bool has_queries, bool appends, int32_t position) const {
    const int32_t place = row_of(p.cache, shape.by_page, kv_head, position);
    each([&](int number) {
      const bool is_query = number < group;
      if (is_query ? !has_queries : !appends || place == kNoRow) return;
      const int head = kv_head * group + number;
      Element* target = is_query ? static_cast<Element*>(p.query) + head * Rows::kHeadSize
                                 : static_cast<Element*>(number > group ? p.value_cache : p.key_cache) +
                                       int64_t{place} * Rows::kHeadSize;
      Part part;
      part.load(shared.head(number), p, lane);
      part.store(target, p, lane);
      if (!is_query || p.capture_rows == 0) return;
      const int32_t captured = p.capture_past_len.values[0];
      if (captured < 0) return;
      const auto row = static_cast<unsigned>(captured) % static_cast<unsigned>(p.capture_rows);
      part.store(static_cast<Element*>(p.capture) + (row * p.num_heads + head) * Rows::kHeadSize, p, lane);
    });
  }
};

// `kShare`: blocks that may share a multiprocessor. What registers cannot hold for two would wait for memory
// longer than anything else.
template <typename Rows, int kShare>
__global__ void __launch_bounds__(kTokenBound<Rows::kHeadSize, kShare>, kShare)
    token_kernel(const __grid_constant__ QkvAttentionParams p, const __grid_constant__ DecodeShape shape,
                 const __grid_constant__ TokenSizes sizes) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Element = typename Rows::Element;
  constexpr int kHeadSize = Rows::kHeadSize, kSharers = kKeySharers<kHeadSize, kShare>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ QuadWeights weights[kMergeWarps];
  const TokenShared<Rows> shared(memory, shape, sizes);
  const SwaAttentionParams& params = p.attention;
  const int entry = static_cast<int>(blockIdx.x) / shape.cluster;
  if (threadIdx.x < 2 * shape.warps) shared.loaded[threadIdx.x].init(32 * kSharers);
  if (threadIdx.x == 0) shared.received->init(1);
  fence_barriers();
  __syncthreads();
  cluster_arrive();

  TokenWarp<Rows, kSharers> self(params, shape, shared);
  const TokenHeads<Rows> heads{p.heads, shared, shape, entry};
  TokenPlace place = TokenPlace::of(params, entry);
  TokenLine line;
  int begin, end;
  uint32_t parity = 0;
#pragma unroll 1
  for (bool has_waited = false;; has_waited = true) {  // once, unless what it has read of the place changed
    line = TokenLine(params, shape, sizes.may_join, entry, place);
    begin = line.begin(blockIdx.x);
    end = line.begin(blockIdx.x + 1);
    if (begin < end) self.load(line, begin, true, true);
    if (has_waited) break;
    wait_for_previous_kernel();
    launch_dependents();
    const TokenPlace found = TokenPlace::of(params, entry);
    heads.prepare();
    if (found == place) break;
    copy_async_wait<0>();
    __syncwarp();  // all lanes' copies, before others go to the same place
    parity = begin < end;
    place = found;
  }
  const auto merge = ClusterMerge::of<kHeadSize>(shape, line, memory);
  const int tiles = line.own.tiles.count();
  if (threadIdx.x == 0) shared.received->arrive_expecting(merge.received_bytes(shape, tiles));
  __syncthreads();
  self.take_queries(line);
  cluster_wait();
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile, parity ^= 1) {
    self.sum_tile(line, tile, end, parity);
    if (threadIdx.x >= kMergeThreads) continue;
    TokenTile<Rows>{{params, shape, shared, {}, static_cast<int>(threadIdx.x), kNoKeys, {}}}.send(
        weights[threadIdx.x / 32], merge, line, tile);
  }
  if (merge.rank < merge.units.count) {
    wait_for_cluster(*shared.received, 0);
    TokenMerge<Rows>{params, shape, line, merge,
                     SpanRound::of(shared.rounds, sizes.spans, 1 << merge.units.columns.shift)}
        .run();
  }
  const bool has_queries = merge.rank == 0 && place.exists,
             appends = begin < end && line.hold_last(begin, end);
  if (has_queries || appends) heads.store(has_queries, appends, place.past);
#else
  refuse_architecture();
#endif
}

}  // namespace ortolan::cuda
