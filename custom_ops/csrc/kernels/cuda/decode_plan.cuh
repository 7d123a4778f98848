// How decode attention is cut up: which block sums which key tiles, and where its partial sums go.
//
// The tiles of all entries (sequence, kv head, tile of query rows) form one line, and each block takes an
// equal, contiguous piece of it. A block cannot go on with the sums of another, and the order of additions
// must not depend on the cuts. So sums are built in a tree that is fixed by key position: tiles into
// segments, segments into spans, each level in ascending order. What a block holds whole it hands on as one
// partial (a span, else a segment, else a tile); the combine kernel rebuilds the rest in the same order. At
// most one span and one segment straddle the end of a block's piece, so the place of a partial follows from
// that block's number, and memory does not grow with the context. Lengths are read on the device: the cuts
// move as the context grows, the bits of the result do not.
#pragma once

#include "kernels.h"
#include "key_tiles.cuh"
#include "softmax.cuh"

namespace ortolan::cuda {

constexpr int kSegmentTiles = 4;
constexpr int kSpanSegments = 8;
constexpr int kSpanTiles = kSegmentTiles * kSpanSegments;

// Sizes that the host knows.
struct DecodeShape {
  int group;  // query heads per kv head
  int tile_keys;
  int entry_rows;  // query rows (token, head of the group) that an entry may hold
  int row_tiles;   // entries per sequence and kv head
  int entries;
  int blocks;
  int max_spans;  // per entry

  __host__ __device__ int64_t partials() const {
    return static_cast<int64_t>(entries) * max_spans +
           static_cast<int64_t>(blocks) * (kSpanSegments + kSegmentTiles);
  }
};

// Of one entry: its sequence's rows and the tiles that they visit.
struct DecodeEntry {
  int sequence;
  int kv_head;
  int first_row;  // first query row; rows count tokens outermost, heads of the group innermost
  int rows;
  int32_t first_position;  // of the sequence's first new token
  int32_t last_position;
  KeyTiles tiles;

  static __device__ __forceinline__ DecodeEntry of(const SwaAttentionParams& params, const DecodeShape& shape,
                                                   int index) {
    DecodeEntry entry;
    const int pair = index / shape.row_tiles;
    const int kv_heads = static_cast<int>(params.cache.num_kv_heads);
    entry.sequence = pair / kv_heads;
    entry.kv_head = pair % kv_heads;
    entry.first_row = index % shape.row_tiles * shape.entry_rows;
    const int tokens = static_cast<int>(params.packing.count(entry.sequence));
    entry.first_position = static_cast<int32_t>(params.past_len.at(entry.sequence, entry.kv_head));
    const int rows = tokens <= kDecodeTokens ? tokens * shape.group - entry.first_row : 0;
    entry.rows = rows < 0 ? 0 : rows < shape.entry_rows ? rows : shape.entry_rows;
    const Visibility visibility = Visibility::of(params);
    entry.last_position = entry.first_position + tokens - 1;
    entry.tiles = entry.rows ? KeyTiles::of(entry.first_position, entry.last_position,
                                            visibility.window == kNoWindow ? -1 : visibility.window,
                                            visibility.sink, shape.tile_keys)
                             : KeyTiles{};
    return entry;
  }
};

// The line of all tiles. Its pieces are of two lengths, the longer ones first.
struct DecodeLine {
  const int* starts;  // [entries + 1]: tiles before each entry
  int entries;
  unsigned quotient;   // tiles of a shorter piece
  unsigned remainder;  // number of longer pieces

  __device__ __forceinline__ DecodeLine(const int* starts, const DecodeShape& shape)
      : starts(starts), entries(shape.entries) {
    const unsigned total = starts[entries];
    quotient = total / shape.blocks;
    remainder = total - quotient * shape.blocks;
  }
  __device__ __forceinline__ int begin(unsigned block) const {
    return static_cast<int>(block * quotient + (block < remainder ? block : remainder));
  }
  // The block whose piece holds a tile.
  __device__ __forceinline__ int owner(unsigned tile) const {
    const unsigned in_longer = remainder * (quotient + 1);
    return static_cast<int>(tile < in_longer ? tile / (quotient + 1)
                                             : remainder + (tile - in_longer) / quotient);
  }
  __device__ __forceinline__ int entry_of(int tile) const {
    int low = 0, high = entries;  // starts[low] <= tile < starts[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (starts[middle] <= tile)
        low = middle;
      else
        high = middle;
    }
    return low;
  }
};

// A level's group of tiles that an entry visits: order numbers begin .. end within the entry.
struct TileRange {
  int begin;
  int end;

  static __device__ __forceinline__ TileRange of(const KeyTiles& tiles, int first_tile, int num_tiles) {
    return {tiles.rank(first_tile), tiles.rank(first_tile + num_tiles)};
  }
};

// Where partial sums lie.
struct PartialPlaces {
  int max_spans;
  int64_t segments;  // first place of segments
  int64_t tiles;     // first place of tiles

  static __host__ __device__ __forceinline__ PartialPlaces of(const DecodeShape& shape) {
    const int64_t spans = static_cast<int64_t>(shape.entries) * shape.max_spans;
    return {shape.max_spans, spans, spans + static_cast<int64_t>(shape.blocks) * kSpanSegments};
  }
  // Spans count from the entry's first; sinks' spans come before the window's.
  __device__ __forceinline__ int64_t span(int entry, int number) const {
    return static_cast<int64_t>(entry) * max_spans + number;
  }
  __device__ __forceinline__ int64_t segment(int owner, int tile) const {
    return segments + owner * kSpanSegments + tile / kSegmentTiles % kSpanSegments;
  }
  __device__ __forceinline__ int64_t tile(int owner, int tile) const {
    return tiles + owner * kSegmentTiles + tile % kSegmentTiles;
  }
};

// Maximum (in logits' own unit of log2) and denominator of one row's partial sum.
struct RowState {
  float maximum;
  float total;
};

// Factors that bring two partial sums to their common maximum. The same function everywhere: it fixes the
// bits.
struct Merge {
  float kept;
  float added;
  RowState state;

  static __device__ __forceinline__ Merge of(RowState a, RowState b) {
    Merge merge;
    const float maximum = fmaxf(a.maximum, b.maximum);
    const float base = finite_max(maximum);
    merge.kept = fast_exp2(a.maximum - base);
    merge.added = fast_exp2(b.maximum - base);
    merge.state = {maximum, fmaf(a.total, merge.kept, b.total * merge.added)};
    return merge;
  }
  __device__ __forceinline__ float apply(float a, float b) const { return fmaf(a, kept, b * added); }
};

constexpr RowState kNoKeys{-INFINITY, 0.0f};

}  // namespace ortolan::cuda
