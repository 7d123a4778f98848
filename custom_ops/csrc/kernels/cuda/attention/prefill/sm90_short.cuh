// What is different for short chunks: their rows are packed, and their keys split among blocks. On sm_90a.
//
// A few tokens fill no tile, and have too few tiles to fill a GPU. So the heads of a group are rows of one
// tile, [tokens, heads], which share keys and values; and the keys of a tile are cut into spans, each a work
// of its own. A span's sums go to memory, and the block that is the last to finish one of a tile merges them
// all. Where many long sequences have short chunks, more spans than memory is set aside for, one block takes
// all spans of a tile and merges them as it goes: the same additions. Source of the packed heads and the
// split over keys: FlashAttention (GQA packing, num_splits).
#pragma once

#include "kernels/cuda/attention/key_tiles.cuh"
#include "kernels/cuda/common/divisor.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "key_spans.cuh"
#include "query_tiles.cuh"

namespace ortolan::cuda {

// The 64 rows of a warpgroup: tokens of one head.
struct LongChunks {
  static ORTOLAN_HOST_DEVICE int heads() { return 1; }
  static ORTOLAN_HOST_DEVICE int tokens() { return 64; }
  static ORTOLAN_HOST_DEVICE int token(int row) { return row; }
  static ORTOLAN_HOST_DEVICE int head(int) { return 0; }
};

// A span of a tile's keys.
struct SpanOfKeys {
  int number;       // 0 where it is not alone
  int count;        // of spans that the tile has
  bool is_alone;    // else the work is all of the tile's spans
  int place;        // of the tile's first span among sums in memory
  int first_count;  // of the tile, for each warpgroup: of all its sums that are merged, then of spans
};

// Tokens outermost, the heads of a group innermost.
struct ShortChunks {
  int group;
  int group_tokens;  // as many as a warpgroup's rows hold
  Divisor by_group;
  int most_places, most_counts;
  float4* partials;  // [most_places]: sums of a block's warpgroups
  unsigned* counts;  // [most_counts], zero between launches

  ORTOLAN_HOST_DEVICE int heads() const { return group; }
  ORTOLAN_HOST_DEVICE int tokens() const { return group_tokens; }
  ORTOLAN_HOST_DEVICE int token(int row) const { return by_group.divide(row); }
  ORTOLAN_HOST_DEVICE int head(int row) const { return row - token(row) * group; }

  // Tiles of all sequences, and the end of the longest one.
  struct Totals {
    int tiles, end;
  };
  // For whole warps.
  __device__ __forceinline__ Totals count(const SwaAttentionParams& params, int tile_tokens,
                                          const OwnTokens& own) const {
    const int lengths = params.past_len.head_stride ? static_cast<int>(params.cache.num_kv_heads) : 1;
    Totals totals{};
    for (int sequence = threadIdx.x % 32; sequence < params.packing.num_sequences; sequence += 32) {
      const auto tokens = static_cast<int>(params.packing.count(sequence));
      int past = 0;
      for (int head = 0; head < lengths; ++head)
        past = max(past, static_cast<int>(params.past_len.at(sequence, head)));
      if (!own.hold(tokens)) continue;
      totals.tiles += divide_up(tokens, tile_tokens);
      totals.end = max(totals.end, past + tokens);
    }
    return {fold_lanes<16, 1>(totals.tiles, Add()), fold_lanes<16, 1>(totals.end, Max())};
  }

  // Cuts what a tile visits to its span; returns whether anything is left.
  template <int kKeys>
  static __device__ __forceinline__ bool cut(SpanOfKeys& span, KeyTiles& visits) {
    using Spans = KeySpans<kKeys>;
    span.count = Spans::of(visits.end - 1) + 1;
    if (span.is_alone) {
      visits.begin = Spans::first(span.number);
      visits.end = min(Spans::first(span.number + 1), visits.end);
    }
    return visits.begin < visits.end;
  }
};

}  // namespace ortolan::cuda
