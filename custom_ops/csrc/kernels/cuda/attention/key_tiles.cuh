// Which key tiles a block of queries must visit: whole tiles outside the window and the sinks are skipped.
#pragma once

#include <cstdint>

#include "kernels/cache_layout.h"
#include "kernels/cuda/common/softmax.cuh"

namespace ortolan::cuda {

// A tile's size that only the host knows.
struct PowerOfTwo {
  int32_t shift;
};
ORTOLAN_HOST_DEVICE int32_t operator/(int32_t number, PowerOfTwo divisor) { return number >> divisor.shift; }
ORTOLAN_HOST_DEVICE int32_t divide_up(int32_t number, int32_t divisor) {
  return (number + divisor - 1) / divisor;
}
ORTOLAN_HOST_DEVICE int32_t divide_up(int32_t number, PowerOfTwo divisor) {
  return (number + (1 << divisor.shift) - 1) >> divisor.shift;
}

// Tiles are cut by key position, never by where a chunk starts, and are visited in ascending order: the sums
// of a query are the same however the prompt was cut. Tile n holds the positions n * tile .. (n + 1) * tile.
struct KeyTiles {
  int32_t sink_end;  // tiles 0 .. sink_end hold sinks and lie before the window's
  int32_t begin;     // tiles begin .. end hold the window, and sinks within or behind it
  int32_t end;

  // Tile: int or PowerOfTwo.
  template <typename Tile>
  static __device__ __forceinline__ KeyTiles of(const SeenPositions& seen, Tile tile) {
    KeyTiles tiles;
    const int32_t sink_tiles = divide_up(seen.sink_end, tile);
    tiles.begin = max(seen.oldest, 0) / tile;
    tiles.end = max(divide_up(seen.newest + 1, tile), sink_tiles);
    tiles.sink_end = min(sink_tiles, tiles.begin);
    return tiles;
  }

  ORTOLAN_HOST_DEVICE int32_t count() const { return sink_end + (end > begin ? end - begin : 0); }
  // The n-th tile to visit.
  ORTOLAN_HOST_DEVICE int32_t at(int32_t n) const { return n < sink_end ? n : begin + (n - sink_end); }
  // How many of the tiles to visit come before `tile`.
  ORTOLAN_HOST_DEVICE int32_t rank(int32_t tile) const {
    const int32_t after = tile < end ? tile - begin : end - begin;
    return (tile < sink_end ? tile : sink_end) + (after > 0 ? after : 0);
  }
};

}  // namespace ortolan::cuda
