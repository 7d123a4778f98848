// The warps of decode attention that merge: what the multiplying warps left of a tile, tiles into spans, and
// what of it goes on to the combine kernel.
//
// Per tile two steps: threads own a row and one multiplying warp's part of it, and find its weight; then they
// own a column and rows in fours, and add up.
#pragma once

#include "cursor.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "received.cuh"
#include "shared.cuh"

namespace ortolan::cuda {

constexpr int kMergeWarps = 4;
constexpr int kMergeThreads = kMergeWarps * 32;
constexpr int kParts = 8;  // of a tile, at most: multiplying warps

// What the second step needs of the first, by row.
template <int kRows>
struct alignas(16) TileFactors {
  float weights[kParts][kRows];  // of each part in the tile
  float kept[kRows];             // of the span's earlier tiles in the span
  float added[kRows];            // of the tile in the span
  float maximum[kRows];          // of the tile or, where it is merged, of the span so far
  float total[kRows];
};

// What a multiplying warp's part counts in its tile, and the softmax of that.
struct PartWeight {
  float weight;
  SoftmaxState tile;
};

template <typename Rows, int kRowTiles>
struct DecodeMerge {
  using Sums = DecodeSums<Rows>;
  static constexpr int kHeadSize = Rows::kHeadSize;
  static constexpr int kRows = kDecodeTileRows * kRowTiles;
  static constexpr int kColumns = kHeadSize < kMergeThreads ? 1 : kHeadSize / kMergeThreads;  // of a thread
  static constexpr int kQuads = kRows / 4 * kHeadSize / kColumns / kMergeThreads;             // of a thread
  using Factors = TileFactors<kRows>;

  const SwaAttentionParams& params;
  const DecodeShape& shape;
  const DecodeShared& shared;
  DecodeWorkspace workspace;
  int thread;
  SoftmaxState span_state;  // of row thread / kParts
  float4 sums[kQuads][kColumns];

  __device__ __forceinline__ int quad(int q) const {
    return q * (kRows / 4 / kQuads) + thread / (kHeadSize / kColumns);
  }
  __device__ __forceinline__ int column(int c) const {
    return thread % (kHeadSize / kColumns) + c * kMergeThreads;
  }

  __device__ __forceinline__ void clear() {
    span_state = kNoKeys;
#pragma unroll
    for (int n = 0; n < kQuads * kColumns; ++n) sums[n / kColumns][n % kColumns] = float4{};
  }

  // Of a row, for kParts neighbouring lanes. Parts are added in a tree, which fixes their order.
  __device__ __forceinline__ PartWeight weigh_part(int row, int part, int buffer) const {
    const bool is_there = row < kRows && part < shape.warps;
    const int state = (buffer * shape.warps + part) * kRows + row;
    const SoftmaxState mine = is_there ? SoftmaxState{shared.maxima[state], shared.totals[state]} : kNoKeys;
    SoftmaxState tile = mine;
    tile.maximum = fold_lanes<1, kParts / 2>(tile.maximum, Max());
    const float weight = fast_exp2(mine.maximum - finite_max(tile.maximum));
    tile.total = __fmul_rn(mine.total, weight);
    tile.total = fold_lanes<1, kParts / 2>(tile.total, Add());
    return {weight, tile};
  }

  // First step.
  __device__ __forceinline__ void find_factors(Factors& factors, int buffer, bool is_merged) {
    const int row = thread / kParts, part = thread % kParts;
    auto [weight, tile] = weigh_part(row, part, buffer);
    const Merge merge = Merge::of(span_state, tile);
    if (is_merged) span_state = tile = merge.state;
    if (row >= kRows) return;
    factors.weights[part][row] = weight;
    if (part) return;
    factors.kept[row] = merge.kept;
    factors.added[row] = merge.added;
    factors.maximum[row] = tile.maximum;
    factors.total[row] = tile.total;
  }

  static __device__ __forceinline__ float4 load(const float* values) {
    return *reinterpret_cast<const float4*>(values);
  }
  static __device__ __forceinline__ float4 scale_add(float4 a, float4 b, float4 c) {
    return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z), fmaf(a.w, b.w, c.w)};
  }

  // Second step, for one quad: the tile's sums from the parts of all warps, in ascending order. `weights`: of
  // the quad, kStride floats from one part to the next.
  template <int kStride>
  __device__ __forceinline__ void sum_tile(float4 (&tile)[kColumns], const float* weights, int quad,
                                           int buffer) const {
    const int warp_floats = Sums::floats(shape.entry_rows);
    const float* parts[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      parts[c] = shared.sums + buffer * shape.warps * warp_floats + Sums::at(quad, column(c));
      tile[c] = float4{};
    }
#pragma unroll 4
    for (int part = 0; part < shape.warps; ++part) {
      const float4 weight = load(weights + part * kStride);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        tile[c] = scale_add(load(parts[c] + part * warp_floats), weight, tile[c]);
    }
  }

  __device__ __forceinline__ void merge_tile(const Factors& factors, const DecodeCursor& cursor,
                                             const DecodeSpan& span, int64_t place) {
    const bool ends_span = cursor.number + 1 == span.end;
    const bool is_all = span.is_whole && span.tiles.end - span.tiles.begin == cursor.of.tiles.count();
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (quad(q) * 4 >= cursor.of.rows) continue;
      float4 tile[kColumns];
      sum_tile<kRows>(tile, factors.weights[0] + quad(q) * 4, quad(q), cursor.buffer.place);
      if (!span.is_merged) {
        store_partial(factors, place, quad(q), tile);
        continue;
      }
      const float4 kept = load(factors.kept + quad(q) * 4), added = load(factors.added + quad(q) * 4);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float4 t{tile[c].x * added.x, tile[c].y * added.y, tile[c].z * added.z, tile[c].w * added.w};
        sums[q][c] = scale_add(sums[q][c], kept, t);
      }
      if (ends_span && is_all) store_output(factors, cursor.of, q);
      if (ends_span && !is_all) store_partial(factors, place, quad(q), sums[q]);
    }
    if (ends_span) clear();
  }

  __device__ __forceinline__ void store_partial(const Factors& factors, int64_t place, int quad,
                                                const float4 (&values)[kColumns]) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = quad * 4 + r;
      const int64_t target = place * workspace.rows + row;
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        store_kept(workspace.sums + target * kHeadSize + column(c),
                   reinterpret_cast<const float*>(&values[c])[r]);
      if (column(0) == 0)
        store_kept(workspace.states + target, SoftmaxState{factors.maximum[row], factors.total[row]});
    }
  }

  // Second step where a tile's sums are sent to the blocks that merge them: `number` among those of its
  // entry, which has so many rows.
  template <typename Target>
  __device__ __forceinline__ void send_tile(const Factors& factors, const Target& target, int number,
                                            int rows, int buffer) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (quad(q) * 4 >= rows) continue;
      float4 tile[kColumns];
      sum_tile<kRows>(tile, factors.weights[0] + quad(q) * 4, quad(q), buffer);
      const int row = quad(q) * 4 + thread % 4;
      send_partial({factors.maximum[row], factors.total[row]}, target, number, row, rows, tile);
    }
  }
  // For whole warps. `state`: of the row, which is the thread's one of a quad.
  template <typename Target>
  __device__ __forceinline__ void send_partial(SoftmaxState state, const Target& target, int tile, int row,
                                               int rows, const float4 (&values)[kColumns]) const {
    const ClusterUnits& units = target.units;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float4 sums = transpose_quad(values[c]);
      if (row >= rows) continue;
      const int first = column(c) / 4 * 4, unit = (row << units.groups.shift) + first / units.columns;
      const int turn = shape.by_line.divide(unit), block = unit - turn * shape.cluster;
      const int own = first & ((1 << units.columns.shift) - 1);
      send_to(target.received.sum(tile, turn, own), block, sums, *shared.received);
      if (own == 0)
        send_to(target.received.state(tile, turn), block, float2{state.maximum, state.total},
                *shared.received);
    }
  }

  // An entry that one block summed whole needs no combining.
  __device__ __forceinline__ void store_output(const Factors& factors, const DecodeEntry& entry,
                                               int q) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = quad(q) * 4 + r;
      if (row >= entry.rows) return;
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        entry.store_row<typename Rows::Element>(params, shape, row, column(c),
                                                {factors.maximum[row], factors.total[row]},
                                                reinterpret_cast<const float*>(&sums[q][c])[r]);
    }
  }
};

}  // namespace ortolan::cuda
