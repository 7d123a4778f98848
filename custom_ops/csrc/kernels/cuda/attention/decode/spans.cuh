// What blocks and warps that merge decode attention's partial sums have alike: which spans there are, and the
// factors of their tiles and of a round of them.
#pragma once

#include "kernels/cuda/common/warp.cuh"
#include "plan.cuh"

namespace ortolan::cuda {

constexpr int kRoundSpans = 64;
constexpr int kSpanParts = 8;  // of a round: spans that are added up one after another

// The spans that an entry visits: sinks', then the window's.
struct VisitedSpans {
  int sink_end;
  int begin;
  int end;

  static __device__ __forceinline__ VisitedSpans of(const KeyTiles& tiles, PowerOfTwo span_tiles) {
    const int sink_end = divide_up(tiles.sink_end, span_tiles);
    return {sink_end, max(tiles.begin / span_tiles, sink_end), divide_up(tiles.end, span_tiles)};
  }
  __device__ __forceinline__ int count() const { return sink_end + max(end - begin, 0); }
  __device__ __forceinline__ bool hold(int span) const {
    return span < end && (span < sink_end || span >= begin);
  }
  // The first round after `round` that has a span, or one past the last.
  __device__ __forceinline__ int next_round(int round) const {
    const int next = round + 1, sink_rounds = (sink_end + kRoundSpans - 1) / kRoundSpans;
    return next < sink_rounds ? next : max(next, begin / kRoundSpans);
  }
};

// Of all entries together, and how to cut their line. But for tiles, what decides: spans where these may end
// pieces, the longest entry where entries may.
struct LineCounts {
  static constexpr int kSeveralSpans = 1 << 20;
  int tiles;
  int spans;
  int most_tiles;  // of an entry, or kSeveralSpans

  // Of so many entries with the same tiles.
  __device__ __forceinline__ void add(const DecodeShape& shape, const KeyTiles& visited, int entries) {
    tiles += visited.count() * entries;
    if (!shape.cuts()) return;
    const int of_entry = VisitedSpans::of(visited, shape.span_tiles).count();
    spans += of_entry * entries;
    most_tiles = max(most_tiles, of_entry > 1 ? kSeveralSpans : visited.count());
  }
  // By measurements on an H200.
  __device__ __forceinline__ Cut cut(const DecodeShape& shape) const {
    if (shape.own_entries && fit_blocks(shape)) return Cut::kWithEntries;
    return shape.may_snap && fit_spans(shape) ? Cut::kWithSpans : Cut::kAnywhere;
  }
  // Entries of one span, none much longer than others, leave nothing to merge where each is one block's.
  __device__ __forceinline__ bool fit_blocks(const DecodeShape& shape) const {
    constexpr int kMoreTiles = 2;
    return most_tiles * shape.own_entries - shape.by_line.divide(tiles) <= kMoreTiles;
  }
  // Partial sums of many rows are long, and are merged sooner where every span is handed on whole; but spans
  // may be too few to share them out evenly. The longest piece may be as much longer than an even one as
  // merging shared spans takes.
  __device__ __forceinline__ bool fit_spans(const DecodeShape& shape) const {
    constexpr int kMoreTiles = 2, kMoreEighths = 1;
    const int64_t most = shape.by_line.divide(spans + shape.blocks - 1);                 // spans of a piece
    const int64_t longest = most * tiles * shape.blocks, even = int64_t{tiles} * spans;  // * blocks * spans
    return 8 * longest <= (8 + kMoreEighths) * even + int64_t{8 * kMoreTiles} * shape.blocks * spans;
  }
};

// Maximum and denominator of a round's spans, and the weights of each lane's two: its own number's and that
// of the lane 32 later.
__device__ __forceinline__ SoftmaxState weigh_spans(float (&weights)[2], SoftmaxState low,
                                                    SoftmaxState high) {
  SoftmaxState all{fmaxf(low.maximum, high.maximum), 0};
  all.maximum = fold_lanes<1, 16>(all.maximum, Max());
  const float base = finite_max(all.maximum);
  weights[0] = fast_exp2(low.maximum - base);
  weights[1] = fast_exp2(high.maximum - base);
  all.total = fmaf(low.total, weights[0], high.total * weights[1]);
  all.total = fold_lanes<1, 16>(all.total, Add());
  return all;
}

// Factors that merge the tiles of a span one after another, those of Merge: for groups of kMostSpanTiles
// lanes, each of which has one tile's state, or kNoKeys.
struct SpanFactors {
  static constexpr int kLanes = kMostSpanTiles;

  unsigned lanes;  // that do the same
  SoftmaxState tile;
  float highest;  // of tiles so far
  float kept, added;

  static __device__ __forceinline__ int own() { return static_cast<int>(threadIdx.x) % kLanes; }
  static __device__ __forceinline__ SpanFactors of_group(SoftmaxState tile) {
    return of(tile, ((1u << kLanes) - 1) << (threadIdx.x % 32 - own()));
  }
  static __device__ __forceinline__ SpanFactors of_warp(SoftmaxState tile) { return of(tile, ~0u); }
  static __device__ __forceinline__ SpanFactors of(SoftmaxState tile, unsigned lanes) {
    SpanFactors factors;
    factors.lanes = lanes;
    factors.tile = tile;
    factors.highest = tile.maximum;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2)
      factors.highest = fmaxf(factors.highest, __shfl_up_sync(factors.lanes, factors.highest, step, kLanes));
    const float before = __shfl_up_sync(factors.lanes, factors.highest, 1, kLanes);
    const float base = finite_max(factors.highest);
    factors.kept = own() ? fast_exp2(before - base) : 0;
    factors.added = fast_exp2(tile.maximum - base);
    return factors;
  }
  // Of tile t with those before; the same in all lanes, and so are the states.
  __device__ __forceinline__ Merge merge(int t) const {
    return {__shfl_sync(lanes, kept, t, kLanes), __shfl_sync(lanes, added, t, kLanes), {}};
  }
  __device__ __forceinline__ float total(int t) const { return __shfl_sync(lanes, tile.total, t, kLanes); }
  __device__ __forceinline__ float maximum() const { return __shfl_sync(lanes, highest, kLanes - 1, kLanes); }
};

}  // namespace ortolan::cuda
