// Which pairs of token and choice the blocks of bytes.cuh multiply, tile after tile.
#pragma once

#include "byte_inputs.cuh"
#include "gate_product.cuh"
#include "kernels/cuda/common/warp.cuh"

namespace ortolan::cuda {

// Pairs of one expert that share a pass over its weights: a slot of the list of tiles.
struct BytePairs {
  int expert;
  int first;  // place of the first in the order of experts, or the pair itself
  int count;

  static __device__ __forceinline__ int passes(const ByteExpertParams& p, int pairs) {
    return (pairs + p.plan.pairs - 1) / p.plan.pairs;
  }
  static __device__ __noinline__ BytePairs shared(const ByteExpertParams& p, int slot) {
    const int lane = threadIdx.x % 32, experts = static_cast<int>(p.step.num_experts);
#pragma unroll 1
    for (int base = 0; base < experts; base += 32) {
      const int own = min(base + lane, experts - 1), begin = p.scratch.offsets[own];
      const int pairs = base + lane < experts ? p.scratch.offsets[own + 1] - begin : 0;
      const int until = inclusive_sum(passes(p, pairs), lane);
      if (const unsigned behind = __ballot_sync(~0u, slot < until)) {
        const int owner = __ffs(static_cast<int>(behind)) - 1;
        const int before = __shfl_sync(~0u, (slot - until + passes(p, pairs)) * p.plan.pairs, owner);
        const int left = __shfl_sync(~0u, pairs, owner) - before;
        return {base + owner, __shfl_sync(~0u, begin, owner) + before, min(left, p.plan.pairs)};
      }
      slot -= __shfl_sync(~0u, until, 31);
    }
    return {0, 0, 0};
  }
  // Those of a slot; for whole warps.
  static __device__ __forceinline__ BytePairs of(const ByteExpertParams& p, int slot) {
    if (p.is_shared) return shared(p, slot);
    const int32_t expert = p.step.experts[slot];
    return {expert, slot, exists(p.step, expert) ? 1 : 0};
  }
  // How many slots there are; for whole warps.
  static __device__ __forceinline__ int slots(const ByteExpertParams& p) {
    if (!p.is_shared) return static_cast<int>(p.step.num_tokens * p.step.top_k);
    int count = 0;
#pragma unroll 2
    for (int expert = threadIdx.x % 32; expert < static_cast<int>(p.step.num_experts); expert += 32)
      count += passes(p, p.scratch.offsets[expert + 1] - p.scratch.offsets[expert]);
    return __reduce_add_sync(~0u, count);
  }
  __device__ __forceinline__ int pair_of(const ByteExpertParams& p, int n) const {
    return p.is_shared ? p.scratch.order[first + n] : first;
  }
};

// Some tiles of a slot, one behind the other in the block's share of the list.
struct ByteTurn {
  const ByteExpertParams& p;
  int row = 0, end = 0;  // of the list
  int slot = 0;
  BytePairs pairs{};
  int first_tile = 0, tiles = 0;

  // Finds the share. Where pairs have rows of their own, nothing is read yet, and `pairs` lacks the expert.
  __device__ __forceinline__ explicit ByteTurn(const ByteExpertParams& p) : p(p) {
    if (!p.is_shared) share(static_cast<unsigned>(p.step.num_tokens * p.step.top_k));
  }
  __device__ __forceinline__ void share(unsigned slots) {
    const unsigned rows = slots * p.plan.tiles;
    const auto edge = [&](unsigned block) { return static_cast<int>(rows * block / gridDim.x); };
    row = edge(blockIdx.x);
    end = edge(blockIdx.x + 1);
    slot = row / p.plan.tiles;
    first_tile = row - slot * p.plan.tiles;
    pairs = {0, slot, 1};
  }
  // Reads what the first tiles' pairs are; for whole warps.
  __device__ __forceinline__ void start() {
    if (p.is_shared) share(BytePairs::slots(p));
    open(true);
  }
  __device__ __forceinline__ bool done() const { return row >= end; }
  __device__ __forceinline__ void open(bool is_new) {
    while (row < end) {
      if (is_new) pairs = BytePairs::of(p, slot);
      tiles = min(min(p.plan.turn_tiles, p.plan.tiles - first_tile), end - row);
      if (pairs.count > 0) return;
      row += p.plan.tiles - first_tile;  // of an expert that does not exist
      first_tile = 0;
      ++slot;
      is_new = true;
    }
  }
  __device__ __forceinline__ void next() {
    row += tiles;
    first_tile += tiles;
    const bool is_new = first_tile == p.plan.tiles;
    if (is_new) {
      first_tile = 0;
      ++slot;
    }
    open(is_new);
  }
};

// A warp's units, as it fetches them.
struct ByteExpertCursor {
  ByteTurn turn;
  int team, member;
  int tile, slice;  // of the turn, and of the tile

  __device__ __forceinline__ ByteExpertCursor(const ByteTurn& first, int team, int member)
      : turn(first), team(team), member(member), tile(team), slice(member) {
    settle();
  }
  __device__ __forceinline__ bool done() const { return turn.done(); }
  __device__ __forceinline__ int expert_tile() const { return turn.first_tile + tile; }
  __device__ __forceinline__ void settle() {
    for (; !turn.done() && tile >= turn.tiles; tile = team) turn.next();
  }
  // Whether the tile has changed.
  __device__ __forceinline__ bool advance() {
    slice += turn.p.plan.span;
    if (slice < turn.p.plan.slices) return false;
    slice = member;
    tile += turn.p.plan.teams;
    settle();
    return true;
  }
};

}  // namespace ortolan::cuda
