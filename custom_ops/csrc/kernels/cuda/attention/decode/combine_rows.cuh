// Merges decode attention's partial sums of entries with many rows: combine.cuh's order of additions, without
// shared memory.
//
// A warp merges a row, or 128 columns of it. Each lane looks for two spans of a round, and then owns columns.
#pragma once

#include "combine.cuh"

namespace ortolan::cuda {

template <int kHeadSize>
struct RowColumns {
  static constexpr int kOfLane = kHeadSize < 128 ? 2 : 4;
  static constexpr int kGroups = kHeadSize / (32 * kOfLane);  // that share a row
  float values[kOfLane];

  __device__ __forceinline__ void load(const float* source) {
    if constexpr (kOfLane == 4)
      *reinterpret_cast<float4*>(values) = *reinterpret_cast<const float4*>(source);
    else
      *reinterpret_cast<float2*>(values) = *reinterpret_cast<const float2*>(source);
  }
  __device__ __forceinline__ void add(const RowColumns& other, float weight) {
#pragma unroll
    for (int c = 0; c < kOfLane; ++c) values[c] = fmaf(other.values[c], weight, values[c]);
  }
  __device__ __forceinline__ void merge(const Merge& merge, const RowColumns& other) {
#pragma unroll
    for (int c = 0; c < kOfLane; ++c) values[c] = merge.apply(values[c], other.values[c]);
  }
};

template <int kHeadSize>
struct CombinedRows {
  using Columns = RowColumns<kHeadSize>;

  const DecodeWorkspace& workspace;
  const PartialRow<kHeadSize, DecodeLine>& row;
  int first_column;  // of the lane
  int lane;
  SoftmaxState states[2];  // of spans lane and lane + 32 of the round
  int places[2];           // twice their places, and 1 where the span was handed on tile by tile; -1: none

  __device__ __forceinline__ int64_t at(int64_t place) const { return place * workspace.rows + row.row; }
  __device__ __forceinline__ SoftmaxState state_at(int64_t place) const {
    return workspace.states[at(place)];
  }
  __device__ __forceinline__ const float* sums_at(int64_t place) const {
    return workspace.sums + at(place) * kHeadSize + first_column;
  }
  __device__ __forceinline__ bool is_part(int first_tile, int t) const {
    return t < 1 << workspace.span_tiles.shift &&
           row.tiles.rank(first_tile + t + 1) > row.tiles.rank(first_tile + t);
  }

  __device__ __forceinline__ void find_span(int number, int index, bool is_visited) {
    states[number] = kNoKeys;
    places[number] = -1;
    if (!is_visited) return;
    const PowerOfTwo span_tiles = workspace.span_tiles;
    const SpanTiles span = SpanTiles::of(row.tiles, index, span_tiles);
    if (span.begin >= span.end) return;
    const int owner = row.line.snaps ? 0 : row.line.owner(row.start() + span.begin);
    if (row.is_whole(span, owner)) {
      const int64_t place =
          workspace.span_place(row.entry, span_number(row.tiles, index, span_tiles, workspace.max_spans));
      states[number] = state_at(place);
      places[number] = static_cast<int>(place) * 2;
      return;
    }
    const int first_tile = index << span_tiles.shift;
    const int64_t place = workspace.tile_place(owner, first_tile);
#pragma unroll 1
    for (int t = 0; t < kMostSpanTiles; ++t) {
      if (!is_part(first_tile, t)) continue;
      states[number] = Merge::of(states[number], state_at(place + t)).state;
    }
    places[number] = static_cast<int>(place) * 2 + 1;
  }

  // The sums of a span that was handed on tile by tile.
  __device__ __forceinline__ Columns sum_tiles(int64_t place, int index) const {
    constexpr int kTogether = 4;
    const int first_tile = index << workspace.span_tiles.shift;
    Columns sum{};
    SoftmaxState state = kNoKeys;
#pragma unroll 1
    for (int begin = 0; begin < 1 << workspace.span_tiles.shift; begin += kTogether) {
      Columns parts[kTogether] = {};
      SoftmaxState part_states[kTogether];
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        part_states[t] = kNoKeys;
        if (!is_part(first_tile, begin + t)) continue;
        part_states[t] = state_at(place + begin + t);
        parts[t].load(sums_at(place + begin + t));
      }
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        const Merge merge = Merge::of(state, part_states[t]);
        state = merge.state;
        sum.merge(merge, parts[t]);
      }
    }
    return sum;
  }

  // The round's sums.
  __device__ __forceinline__ Columns add_round(const float (&weights)[2], int round, int count) const {
    Columns parts[kSpanParts] = {}, sum{};
#pragma unroll 1
    for (int begin = 0; begin < count; begin += kSpanParts) {
      Columns sums[kSpanParts] = {};
      int found[kSpanParts];
#pragma unroll
      for (int p = 0; p < kSpanParts; ++p) {
        found[p] = __shfl_sync(~0u, begin < 32 ? places[0] : places[1], (begin + p) % 32);
        if (found[p] >= 0 && found[p] % 2 == 0) sums[p].load(sums_at(found[p] / 2));
      }
#pragma unroll
      for (int p = 0; p < kSpanParts; ++p) {
        if (found[p] >= 0 && found[p] % 2) sums[p] = sum_tiles(found[p] / 2, round * kRoundSpans + begin + p);
        const float weight = __shfl_sync(~0u, begin < 32 ? weights[0] : weights[1], (begin + p) % 32);
        if (found[p] >= 0) parts[p].add(sums[p], weight);
      }
    }
#pragma unroll
    for (int p = 0; p < kSpanParts; ++p)
#pragma unroll
      for (int c = 0; c < Columns::kOfLane; ++c) sum.values[c] += parts[p].values[c];
    return sum;
  }

  // All of the row.
  __device__ __forceinline__ Columns combine(SoftmaxState& state, PowerOfTwo span_tiles) {
    const VisitedSpans visited = VisitedSpans::of(row.tiles, span_tiles);
    Columns total{};
    state = kNoKeys;
    for (int round = visited.next_round(-1); round * kRoundSpans < visited.end;
         round = visited.next_round(round)) {
      const int begin = round * kRoundSpans, count = min(kRoundSpans, visited.end - begin);
#pragma unroll
      for (int k = 0; k < 2; ++k) find_span(k, begin + lane + 32 * k, visited.hold(begin + lane + 32 * k));
      float weights[2];
      const SoftmaxState added = weigh_spans(weights, states[0], states[1]);
      const Columns sum = add_round(weights, round, count);
      const Merge merge = Merge::of(state, added);
      state = merge.state;
      total.merge(merge, sum);
    }
    return total;
  }
};

// Grid: rows of entries, and groups of their columns, a warp each.
template <typename Element, int kHeadSize>
__global__ void __launch_bounds__(128, 4)
    decode_combine_rows_kernel(const __grid_constant__ SwaAttentionParams params,
                               const __grid_constant__ DecodeShape shape,
                               const __grid_constant__ DecodeWorkspace workspace) {
  using Columns = RowColumns<kHeadSize>;
  launch_dependents();  // who comes next waits for this kernel, and so for the one before
  const int unit = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int number = unit / Columns::kGroups, index = number / shape.entry_rows;
  wait_for_previous_kernel();
  if (index >= shape.entries) return;
  const auto own = CombinedRow::of_entry(params, shape, workspace.starts + shape.entries + 1, index,
                                         number % shape.entry_rows);
  if (own.row >= own.entry.rows) return;

  const DecodeLine line(workspace.starts, shape);
  const int first_column = (unit % Columns::kGroups * 32 + lane) * Columns::kOfLane;
  const PartialRow<kHeadSize, DecodeLine> row{workspace, line, own.entry.tiles, own.index, own.row, 0};
  const int first_span = own.entry.tiles.at(0) / shape.span_tiles;
  if (row.is_stored(SpanTiles::of(own.entry.tiles, first_span, shape.span_tiles))) return;
  CombinedRows<kHeadSize> self{workspace, row, first_column, lane};
  SoftmaxState state;
  const Columns total = self.combine(state, shape.span_tiles);
  own.entry.template store_columns<Element>(params, shape, own.row, first_column, state, total.values);
}

}  // namespace ortolan::cuda
