// Merges decode attention's partial sums of many rows: combine.cuh's order of additions, without shared
// memory.
//
// A warp merges kRows adjacent rows of an entry, or 128 columns of them: it looks once for the places of the
// sums, and what it waits for is on its way for all rows together. Each lane has two spans of a round to look
// for, and columns.
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

template <int kHeadSize, int kRows>
struct CombinedRows {
  using Columns = RowColumns<kHeadSize>;

  const DecodeWorkspace& workspace;
  const PartialRow<kHeadSize, DecodeLine>& first;  // of the rows
  int first_column;                                // of the lane
  int lane;
  SoftmaxState states[2][kRows];  // of spans lane and lane + 32 of the round
  int places[2];  // twice their places, and 1 where the span was handed on tile by tile; -1: none

  __device__ __forceinline__ int64_t at(int64_t place, int row) const {
    return place * workspace.rows + first.row + row;
  }
  __device__ __forceinline__ SoftmaxState state_at(int64_t place, int row) const {
    return workspace.states[at(place, row)];
  }
  __device__ __forceinline__ const float* sums_at(int64_t place, int row) const {
    return workspace.sums + at(place, row) * kHeadSize + first_column;
  }
  __device__ __forceinline__ bool is_part(int first_tile, int t) const {
    return t < 1 << workspace.span_tiles.shift &&
           first.tiles.rank(first_tile + t + 1) > first.tiles.rank(first_tile + t);
  }

  __device__ __forceinline__ void find_span(int number, int index, bool is_visited) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) states[number][r] = kNoKeys;
    places[number] = -1;
    if (!is_visited) return;
    const PowerOfTwo span_tiles = workspace.span_tiles;
    const SpanTiles span = SpanTiles::of(first.tiles, index, span_tiles);
    if (span.begin >= span.end) return;
    const int owner = first.line.snaps ? 0 : first.line.owner(first.start() + span.begin);
    if (first.is_whole(span, owner)) {
      const int64_t place =
          workspace.span_place(first.entry, span_number(first.tiles, index, span_tiles, workspace.max_spans));
#pragma unroll
      for (int r = 0; r < kRows; ++r) states[number][r] = state_at(place, r);
      places[number] = static_cast<int>(place) * 2;
      return;
    }
    const int first_tile = index << span_tiles.shift;
    const int64_t place = workspace.tile_place(owner, first_tile);
#pragma unroll 1
    for (int t = 0; t < kMostSpanTiles; ++t) {
      if (!is_part(first_tile, t)) continue;
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        states[number][r] = Merge::of(states[number][r], state_at(place + t, r)).state;
    }
    places[number] = static_cast<int>(place) * 2 + 1;
  }

  // The sums of a span that was handed on tile by tile.
  __device__ __forceinline__ Columns sum_tiles(int64_t place, int index, int row) const {
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
        part_states[t] = state_at(place + begin + t, row);
        parts[t].load(sums_at(place + begin + t, row));
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

  // The round's sums of one row.
  __device__ __forceinline__ Columns add_round(const float (&weights)[2], int round, int count,
                                               int row) const {
    Columns parts[kSpanParts] = {}, sum{};
#pragma unroll 1
    for (int begin = 0; begin < count; begin += kSpanParts) {
      Columns sums[kSpanParts] = {};
      int found[kSpanParts];
#pragma unroll
      for (int p = 0; p < kSpanParts; ++p) {
        found[p] = __shfl_sync(~0u, begin < 32 ? places[0] : places[1], (begin + p) % 32);
        if (found[p] >= 0 && found[p] % 2 == 0) sums[p].load(sums_at(found[p] / 2, row));
      }
#pragma unroll
      for (int p = 0; p < kSpanParts; ++p) {
        if (found[p] >= 0 && found[p] % 2)
          sums[p] = sum_tiles(found[p] / 2, round * kRoundSpans + begin + p, row);
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

  // All of the rows: states and sums.
  __device__ __forceinline__ void combine(SoftmaxState (&state)[kRows], Columns (&total)[kRows],
                                          PowerOfTwo span_tiles) {
    const VisitedSpans visited = VisitedSpans::of(first.tiles, span_tiles);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      total[r] = {};
      state[r] = kNoKeys;
    }
    for (int round = visited.next_round(-1); round * kRoundSpans < visited.end;
         round = visited.next_round(round)) {
      const int begin = round * kRoundSpans, count = min(kRoundSpans, visited.end - begin);
#pragma unroll
      for (int k = 0; k < 2; ++k) find_span(k, begin + lane + 32 * k, visited.hold(begin + lane + 32 * k));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float weights[2];
        const SoftmaxState added = weigh_spans(weights, states[0][r], states[1][r]);
        const Columns sum = add_round(weights, round, count, r);
        const Merge merge = Merge::of(state[r], added);
        state[r] = merge.state;
        total[r].merge(merge, sum);
      }
    }
  }
};

// Grid: kRows rows of entries, and groups of their columns, a warp each.
template <typename Element, int kHeadSize, int kRows>
__global__ void __launch_bounds__(128, 4)
    decode_combine_rows_kernel(const __grid_constant__ SwaAttentionParams params,
                               const __grid_constant__ DecodeShape shape,
                               const __grid_constant__ DecodeWorkspace workspace) {
  using Columns = RowColumns<kHeadSize>;
  launch_dependents();  // who comes next waits for this kernel, and so for the one before
  const int unit = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = unit / Columns::kGroups, of_entry = shape.entry_rows / kRows;
  const int index = rows / of_entry, first_row = rows % of_entry * kRows;
  wait_for_previous_kernel();
  if (index >= shape.entries) return;
  const auto own =
      CombinedRow::of_entry(params, shape, workspace.starts + shape.entries + 1, index, first_row);
  if (own.row >= own.entry.rows) return;

  const DecodeLine line(workspace.starts, shape);
  const int first_column = (unit % Columns::kGroups * 32 + lane) * Columns::kOfLane;
  const PartialRow<kHeadSize, DecodeLine> first{workspace, line, own.entry.tiles, own.index, own.row, 0};
  const int first_span = own.entry.tiles.at(0) / shape.span_tiles;
  if (first.is_stored(SpanTiles::of(own.entry.tiles, first_span, shape.span_tiles))) return;
  CombinedRows<kHeadSize, kRows> self{workspace, first, first_column, lane};
  SoftmaxState states[kRows];
  Columns totals[kRows];
  self.combine(states, totals, shape.span_tiles);
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (first_row + r < own.entry.rows)
      own.entry.template store_columns<Element>(params, shape, first_row + r, first_column, states[r],
                                                totals[r].values);
}

}  // namespace ortolan::cuda
