// Merges decode attention's partial sums where rows are many: as combine.cuh does, in the same order, with a
// warp for each row. What the rows of an entry have in common a warp finds once for all that it takes.
#pragma once

#include "combine.cuh"

namespace ortolan::cuda {

// Columns that a lane holds, as one vector, and how many warps share a row.
template <int kHeadSize>
struct LaneColumns {
  static constexpr int kCount = kHeadSize < 128 ? kHeadSize / 32 : 4;
  static constexpr int kWarps = kHeadSize / 32 / kCount;
  struct alignas(kCount * 4) Vector {
    float values[kCount];
  };
};

template <int kHeadSize>
struct CombiningWarp {
  using Columns = LaneColumns<kHeadSize>;
  using Vector = typename Columns::Vector;
  static constexpr int kNowhere = -1;

  const DecodeShape& shape;
  const DecodeWorkspace& workspace;
  const DecodeLine& line;
  const KeyTiles& tiles;
  int entry;
  int lane;
  // Of spans lane and lane + 32 of a round: where their partial sums lie, or kNowhere; of those that several
  // blocks share it is where the first tile's would, and there is a bit for each tile.
  int places[2];
  unsigned shared_tiles[2];

  __device__ __forceinline__ void find_place(const VisitedSpans& visited, int index, int half) {
    places[half] = kNowhere;
    shared_tiles[half] = 0;
    if (!visited.hold(index)) return;
    const SpanTiles span = SpanTiles::of(tiles, index, workspace.span_tiles);
    if (span.begin >= span.end) return;
    const int start = line.first(entry), owner = line.snaps ? 0 : line.owner(start + span.begin);
    if (line.snaps || start + span.end <= line.begin(owner + 1)) {
      places[half] = static_cast<int>(
          workspace.span_place(entry, span_number(tiles, index, workspace.span_tiles, workspace.max_spans)));
      return;
    }
    const int first = index << workspace.span_tiles.shift;
    places[half] = static_cast<int>(workspace.tile_place(owner, first));
#pragma unroll 1
    for (int t = 0; t < 1 << workspace.span_tiles.shift; ++t)
      if (tiles.rank(first + t + 1) > tiles.rank(first + t)) shared_tiles[half] |= 1u << t;
  }
  __device__ __forceinline__ void find_places(const VisitedSpans& visited, int round) {
#pragma unroll
    for (int half = 0; half < 2; ++half) find_place(visited, round * kRoundSpans + half * 32 + lane, half);
  }

  __device__ __forceinline__ SoftmaxState load_state(int64_t place, int row) const {
    return workspace.states[place * workspace.rows + row];
  }
  __device__ __forceinline__ Vector load_sums(int64_t place, int row, int column) const {
    return *reinterpret_cast<const Vector*>(workspace.sums + (place * workspace.rows + row) * kHeadSize +
                                            column);
  }
  // Of the lane's span.
  __device__ __forceinline__ SoftmaxState find_state(int half, int row) const {
    if (places[half] == kNowhere) return kNoKeys;
    if (!shared_tiles[half]) return load_state(places[half], row);
    SoftmaxState state = kNoKeys;
#pragma unroll 1
    for (unsigned left = shared_tiles[half]; left; left &= left - 1)
      state = Merge::of(state, load_state(places[half] + __ffs(left) - 1, row)).state;
    return state;
  }
  // Of a span that several blocks share; the same in all lanes.
  __device__ __forceinline__ Vector merge_tiles(int64_t place, unsigned left, int row, int column) const {
    SoftmaxState state = kNoKeys;
    Vector sums{};
#pragma unroll
    for (int t = 0; t < kMostSpanTiles; ++t) {
      if (!(left >> t & 1)) continue;
      const Merge merge = Merge::of(state, load_state(place + t, row));
      const Vector tile = load_sums(place + t, row, column);
      state = merge.state;
#pragma unroll
      for (int i = 0; i < Columns::kCount; ++i) sums.values[i] = merge.apply(sums.values[i], tile.values[i]);
    }
    return sums;
  }
  // Of span n of the round, for whole warps; `has_shared`: whether there are spans that blocks share.
  __device__ __forceinline__ Vector load_span(int n, bool has_shared, int row, int column) const {
    const int place = __shfl_sync(~0u, n < 32 ? places[0] : places[1], n % 32);
    if (has_shared)
      if (const unsigned found = __shfl_sync(~0u, n < 32 ? shared_tiles[0] : shared_tiles[1], n % 32))
        return merge_tiles(place, found, row, column);
    return place == kNowhere ? Vector{} : load_sums(place, row, column);
  }

  // Adds a round's spans up, every kSpanParts-th into the same part.
  __device__ __forceinline__ void add_round(Vector& total, SoftmaxState& state, int count, int row,
                                            int column) const {
    const bool has_shared = __any_sync(~0u, shared_tiles[0] | shared_tiles[1]);
    float weights[2];
    const SoftmaxState added = weigh_spans(weights, find_state(0, row), find_state(1, row));
    Vector parts[kSpanParts] = {};
#pragma unroll 1
    for (int first = 0; first < count; first += kSpanParts) {
      Vector spans[kSpanParts];
#pragma unroll
      for (int part = 0; part < kSpanParts; ++part) {
        spans[part] = Vector{};
        if (first + part < count) spans[part] = load_span(first + part, has_shared, row, column);
      }
#pragma unroll
      for (int part = 0; part < kSpanParts; ++part) {
        if (first + part >= count) break;
        const float weight = __shfl_sync(~0u, first < 32 ? weights[0] : weights[1], (first + part) % 32);
#pragma unroll
        for (int i = 0; i < Columns::kCount; ++i)
          parts[part].values[i] = fmaf(spans[part].values[i], weight, parts[part].values[i]);
      }
    }
    const Merge merge = Merge::of(state, added);
    state = merge.state;
#pragma unroll
    for (int i = 0; i < Columns::kCount; ++i) {
      float sum = 0;
#pragma unroll
      for (int part = 0; part < kSpanParts; ++part) sum += parts[part].values[i];
      total.values[i] = merge.apply(total.values[i], sum);
    }
  }

  // A row's sums in the lane's columns, and its state. Places are those of `placed`, the round before.
  __device__ __forceinline__ Vector combine(const VisitedSpans& visited, bool is_only, int& placed,
                                            SoftmaxState& state, int row, int column) {
    Vector total{};
    state = kNoKeys;
#pragma unroll 1
    for (int round = visited.next_round(-1); round * kRoundSpans < visited.end;
         round = visited.next_round(round)) {
      if (round != placed) find_places(visited, round);
      placed = round;
      if (is_only) {  // all that a round would do to it is to drop the sign of a zero
        const int n = tiles.at(0) / shape.span_tiles - round * kRoundSpans;
        const SoftmaxState low = find_state(0, row), high = find_state(1, row);
        state = {__shfl_sync(~0u, n < 32 ? low.maximum : high.maximum, n % 32),
                 __shfl_sync(~0u, n < 32 ? low.total : high.total, n % 32)};
        total = load_span(n, true, row, column);
#pragma unroll
        for (int i = 0; i < Columns::kCount; ++i) total.values[i] += 0.0f;
        break;
      }
      add_round(total, state, min(kRoundSpans, visited.end - round * kRoundSpans), row, column);
    }
    return total;
  }
};

// Stores the columns that a lane holds of a row, and the row's LSE.
template <typename Element, int kHeadSize>
__device__ __forceinline__ void store_columns(const SwaAttentionParams& params, const DecodeShape& shape,
                                              const DecodeEntry& entry, int row, int column,
                                              SoftmaxState state,
                                              const typename LaneColumns<kHeadSize>::Vector& sums) {
  constexpr int kCount = LaneColumns<kHeadSize>::kCount;
  const int64_t head = entry.head(shape, row);
  const Denominator denominator = Denominator::of(state.total, state.maximum, params.sink_logits, head);
  if (params.lse && column == 0)
    params.lse[head * params.packing.num_tokens + entry.first_token + entry.token(shape, row)] =
        denominator.lse;
  if (column >= params.cache.head_size) return;  // a multiple of 8
  uint32_t packed[kCount / 2];
#pragma unroll
  for (int i = 0; i < kCount; i += 2)
    packed[i / 2] =
        Half<Element>::pack(sums.values[i] * denominator.inverse, sums.values[i + 1] * denominator.inverse);
  auto* to = static_cast<Element*>(params.output) +
             entry.row_number(params, shape, row) * params.cache.head_size + column;
  if constexpr (kCount == 4)
    *reinterpret_cast<uint2*>(to) = make_uint2(packed[0], packed[1]);
  else
    *reinterpret_cast<uint32_t*>(to) = packed[0];
}

constexpr int kCombiningWarps = 8;  // of a block, at most

// Grid: (entries, groups of `rows_at_once` of their rows); blocks take one entry after another.
template <typename Element, int kHeadSize>
__global__ void __launch_bounds__(kCombiningWarps * 32, 2)
    decode_combine_rows_kernel(const __grid_constant__ SwaAttentionParams params,
                               const __grid_constant__ DecodeShape shape,
                               const __grid_constant__ DecodeWorkspace workspace, int rows_at_once) {
  constexpr int kWarps = LaneColumns<kHeadSize>::kWarps;
  launch_dependents();  // who comes next waits for this kernel, and so for the one before
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int* holders = workspace.starts + shape.entries + 1;
  const DecodeLine line(workspace.starts, shape);
  for (auto index = static_cast<int>(blockIdx.x); index < shape.entries; index += gridDim.x) {
    if (shape.counted_strips && holders[shape.by_kv_heads.divide(index)] < 0) return;  // no gaps
    const DecodeEntry entry = DecodeEntry::of(params, shape, index, holders);
    const int first = blockIdx.y * rows_at_once + warp / kWarps;
    const int end = min(entry.rows, static_cast<int>(blockIdx.y + 1) * rows_at_once);
    if (first >= end) continue;
    const int first_span = entry.tiles.at(0) / shape.span_tiles;
    const SpanTiles span = SpanTiles::of(entry.tiles, first_span, shape.span_tiles);
    const bool is_only = span.end - span.begin == entry.tiles.count();
    CombiningWarp<kHeadSize> self{shape, workspace, line, entry.tiles, index, lane, {}, {}};
    const int start = line.first(index);
    if (is_only && (line.snaps || start + span.end <= line.begin(line.owner(start) + 1)))
      continue;  // one block summed the whole entry and stored the output
    const VisitedSpans visited = VisitedSpans::of(entry.tiles, shape.span_tiles);
    const int column = (warp % kWarps * 32 + lane) * LaneColumns<kHeadSize>::kCount;
    int placed = -1;
    for (int row = first; row < end; row += static_cast<int>(blockDim.x) / 32 / kWarps) {
      SoftmaxState state;
      const auto sums = self.combine(visited, is_only, placed, state, row, column);
      store_columns<Element, kHeadSize>(params, shape, entry, row, column, state, sums);
    }
  }
}

}  // namespace ortolan::cuda
