// Which key tiles a block of queries must visit: whole tiles outside the window and the sinks are skipped.
#pragma once

#include <cstdint>

#include "../cache_layout.h"

namespace ortolan::cuda {

// Tiles are cut by key position, never by where a chunk starts, and are visited in ascending order: the sums
// of a query are the same however the prompt was cut. Tile n holds the positions n * tile .. (n + 1) * tile.
struct KeyTiles {
  int32_t sink_end;  // tiles 0 .. sink_end hold sinks and lie before the window's
  int32_t begin;     // tiles begin .. end hold the window
  int32_t end;

  // For queries at positions first .. last (inclusive); W = window (-1: none), S = sink.
  static ORTOLAN_HOST_DEVICE KeyTiles of(int32_t first, int32_t last, int32_t window, int32_t sink,
                                         int32_t tile) {
    KeyTiles tiles;
    const int32_t oldest = window < 0 || first < window ? 0 : first - window + 1;
    tiles.begin = oldest / tile;
    tiles.end = last < 0 ? 0 : last / tile + 1;
    const int32_t sink_tiles = (sink + tile - 1) / tile;
    tiles.sink_end = sink_tiles < tiles.begin ? sink_tiles : tiles.begin;
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
