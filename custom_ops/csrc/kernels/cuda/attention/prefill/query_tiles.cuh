// Which rows of the packed queries a prefill block takes: tiles never cross sequences.
#pragma once

#include <algorithm>

#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/warp.cuh"

namespace ortolan::cuda {

struct QueryTile {
  int32_t sequence = -1;  // -1: nothing to do
  int32_t first = 0;      // row of the packed tokens
  int32_t count = 0;      // rows of the tile
  int32_t offset = 0;     // rows of the sequence before it
};

// No more tiles than this, whatever the lengths of the kernel's sequences.
inline int64_t max_query_tiles(const Packing& packing, int tile_rows, const OwnTokens& own) {
  const int64_t sequences =
      std::min<int64_t>(packing.num_sequences, packing.num_tokens / (own.more_than + 1));
  const int64_t tiles_of_one = (int64_t{own.at_most} + tile_rows - 1) / tile_rows;
  return std::min(packing.num_tokens / tile_rows + sequences, sequences * tiles_of_one);
}

// Tiles of a sequence; none where it is not the kernel's. Past the last sequence too.
__device__ __forceinline__ int query_tiles(const Packing& packing, int sequence, int tile_rows,
                                           const OwnTokens& own) {
  const int tokens =
      sequence >= 0 && sequence < packing.num_sequences ? static_cast<int>(packing.count(sequence)) : 0;
  return own.hold(tokens) ? (tokens + tile_rows - 1) / tile_rows : 0;
}

// Of all sequences. For whole warps.
__device__ __forceinline__ int count_query_tiles(const Packing& packing, int tile_rows,
                                                 const OwnTokens& own) {
  int tiles = 0;
  for (int sequence = threadIdx.x % 32; sequence < packing.num_sequences; sequence += 32)
    tiles += query_tiles(packing, sequence, tile_rows, own);
  return fold_lanes<16, 1>(tiles, Add());
}

// Tile `index` from the end (the longest rows first) among the kernel's sequences. For whole warps.
__device__ __forceinline__ QueryTile find_query_tile(const Packing& packing, int index, int tile_rows,
                                                     const OwnTokens& own) {
  const int lane = threadIdx.x % 32;
  for (int end = static_cast<int>(packing.num_sequences); end > 0; end -= 32) {
    const int sequence = end - 1 - lane;  // lanes count backwards
    const int tiles = query_tiles(packing, sequence, tile_rows, own);
    const int before = inclusive_sum(tiles, lane);
    const unsigned owners = __ballot_sync(~0u, index < before);
    if (owners) {
      const int owner = __ffs(owners) - 1;
      const int owner_tiles = __shfl_sync(~0u, tiles, owner);
      const int place = index - (__shfl_sync(~0u, before, owner) - owner_tiles);
      QueryTile tile;
      tile.sequence = end - 1 - owner;
      tile.offset = (owner_tiles - 1 - place) * tile_rows;
      tile.first = static_cast<int32_t>(packing.first(tile.sequence)) + tile.offset;
      tile.count = min(tile_rows, static_cast<int>(packing.count(tile.sequence)) - tile.offset);
      return tile;
    }
    index -= __shfl_sync(~0u, before, 31);
  }
  return {};
}

// Heads that are taken together, so that their keys and values stay in the L2 cache: whole kv groups.
inline int64_t heads_per_section(const SwaAttentionParams& params) {
  constexpr int64_t kSectionBytes = int64_t{24} << 20;
  const int64_t group = params.num_heads / params.cache.num_kv_heads;
  const int64_t head_bytes =
      2 * params.cache.capacity * params.cache.head_size * element_bytes(params.element);
  int64_t kv_heads = kSectionBytes / (head_bytes > 0 ? head_bytes : 1);
  if (kv_heads > params.cache.num_kv_heads) kv_heads = params.cache.num_kv_heads;
  while (kv_heads > 1 && params.cache.num_kv_heads % kv_heads) --kv_heads;
  return (kv_heads > 0 ? kv_heads : 1) * group;
}

// Block index to (tile, head): sections outermost, heads innermost.
struct TileAndHead {
  int tile;
  int head;
  static __device__ __forceinline__ TileAndHead of(unsigned block, int tiles, int section_heads) {
    const unsigned section_blocks = static_cast<unsigned>(tiles) * section_heads;
    const unsigned section = block / section_blocks;
    const unsigned rest = block - section * section_blocks;
    return {static_cast<int>(rest / section_heads),
            static_cast<int>(section * section_heads + rest % section_heads)};
  }
};

}  // namespace ortolan::cuda
