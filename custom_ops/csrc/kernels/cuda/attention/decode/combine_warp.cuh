// A warp that merges a row's partial sums of decode attention, as combine.cuh does, in the same order.
#pragma once

#include "spans.cuh"

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

// A warp of one entry: where its spans' sums lie serves all of its rows.
template <int kHeadSize>
struct CombiningWarp {
  using Columns = LaneColumns<kHeadSize>;
  using Vector = typename Columns::Vector;
  static constexpr int kNowhere = -1;
  static constexpr int kAtOnce = 4;  // spans that are loaded at once

  const DecodeShape& shape;
  const DecodeWorkspace& workspace;
  const KeyTiles& tiles;
  EvenCut cut;  // of the line
  bool snaps;   // pieces end where spans do
  int start;    // of the entry on the line
  int entry;
  int lane;
  VisitedSpans visited;
  int round;  // whose places are known
  // Of its spans lane and lane + 32: where their partial sums lie, or kNowhere; of those that several blocks
  // share it is where the first tile's would, and there is a bit for each tile.
  int places[2];
  unsigned shared_tiles[2];
  bool has_shared;

  __device__ __forceinline__ CombiningWarp(const DecodeShape& shape, const DecodeWorkspace& workspace,
                                           const KeyTiles& tiles, const EvenCut& cut, bool snaps, int start,
                                           int entry)
      : shape(shape),
        workspace(workspace),
        tiles(tiles),
        cut(cut),
        snaps(snaps),
        start(start),
        entry(entry),
        lane(static_cast<int>(threadIdx.x) % 32),
        visited(VisitedSpans::of(tiles, workspace.span_tiles)),
        round(-1) {}

  // Order number behind the owner's last tile.
  __device__ __forceinline__ int held(int owner) const { return cut.begin(owner + 1) - start; }
  __device__ __forceinline__ bool is_whole(const SpanTiles& span, int owner) const {
    return snaps || span.end <= held(owner);
  }
  // Whether one block summed the whole entry and stored the output.
  __device__ __forceinline__ bool is_stored() const {
    return is_only() && is_whole({0, tiles.count()}, snaps ? 0 : cut.owner(start));
  }
  // Whether the entry visits no other span.
  __device__ __forceinline__ bool is_only() const {
    const int first = tiles.at(0) / workspace.span_tiles;
    return SpanTiles::of(tiles, first, workspace.span_tiles).end == tiles.count();
  }
  __device__ __forceinline__ int first_round() const { return visited.next_round(-1); }

  __device__ __forceinline__ void find_place(int index, int half) {
    places[half] = kNowhere;
    shared_tiles[half] = 0;
    if (!visited.hold(index)) return;
    const SpanTiles span = SpanTiles::of(tiles, index, workspace.span_tiles);
    if (span.begin >= span.end) return;
    const int owner = snaps ? 0 : cut.owner(start + span.begin);
    if (is_whole(span, owner)) {
      places[half] = static_cast<int>(
          workspace.span_place(entry, span_number(tiles, index, workspace.span_tiles, workspace.max_spans)));
      return;
    }
    const int first = index << workspace.span_tiles.shift;
    const int others = held(owner);  // those before are merged, where the first one's sums would be
    places[half] = static_cast<int>(workspace.tile_place(owner, first));
#pragma unroll 1
    for (int t = 0; t < 1 << workspace.span_tiles.shift; ++t) {
      const int rank = tiles.rank(first + t);
      if (tiles.rank(first + t + 1) > rank && (rank == span.begin || rank >= others))
        shared_tiles[half] |= 1u << t;
    }
  }
  __device__ __forceinline__ void find_places(int of_round) {
    if (round == of_round) return;
    round = of_round;
#pragma unroll
    for (int half = 0; half < 2; ++half) find_place(round * kRoundSpans + half * 32 + lane, half);
    has_shared = __any_sync(~0u, shared_tiles[0] | shared_tiles[1]);
  }
  // Of span n of the round.
  template <typename Value>
  static __device__ __forceinline__ Value of_span(const Value (&values)[2], int n) {
    return __shfl_sync(~0u, n < 32 ? values[0] : values[1], n % 32);
  }

  __device__ __forceinline__ SoftmaxState load_state(int64_t place, int row) const {
    return workspace.states[place * workspace.rows + row];
  }
  __device__ __forceinline__ Vector load_sums(int64_t place, int row, int column) const {
    return *reinterpret_cast<const Vector*>(workspace.sums + (place * workspace.rows + row) * kHeadSize +
                                            column);
  }
  // Of the lane's span; none of the first kAtOnce if it is shared, which load_shared finds.
  __device__ __forceinline__ SoftmaxState find_state(int half, int row) const {
    const int place = half ? places[1] : places[0];
    const unsigned there = half ? shared_tiles[1] : shared_tiles[0];
    if (place == kNowhere) return kNoKeys;
    if (!there) return load_state(place, row);
    if (half == 0 && lane < kAtOnce) return kNoKeys;
    SoftmaxState parts[kMostSpanTiles], state = kNoKeys;
#pragma unroll
    for (int t = 0; t < kMostSpanTiles; ++t) parts[t] = there >> t & 1 ? load_state(place + t, row) : kNoKeys;
#pragma unroll
    for (int t = 0; t < kMostSpanTiles; ++t) state = Merge::of(state, parts[t]).state;
    return state;
  }
  // Of a span that several blocks share; the same in all lanes, and so is its state.
  __device__ __forceinline__ Vector merge_tiles(SoftmaxState& state, int64_t place, unsigned there, int row,
                                                int column) const {
    const int own = SpanFactors::own();
    const SoftmaxState tile = there >> own & 1 ? load_state(place + own, row) : kNoKeys;
    const auto factors = SpanFactors::of_warp(tile);
    state = {factors.maximum(), 0};
    Vector sums{};
#pragma unroll 1
    for (int first = 0; first < kMostSpanTiles; first += kAtOnce) {
      Vector parts[kAtOnce];
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t)
        parts[t] = there >> first + t & 1 ? load_sums(place + first + t, row, column) : Vector{};
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
        const Merge merge = factors.merge(first + t);
        state.total = merge.apply(state.total, factors.total(first + t));
#pragma unroll
        for (int i = 0; i < Columns::kCount; ++i)
          sums.values[i] = merge.apply(sums.values[i], parts[t].values[i]);
      }
    }
    return sums;
  }
  // Of kAtOnce spans from `first` on: first those that were handed on whole, then others, with their states,
  // one for each of the first lanes. For whole warps.
  __device__ __forceinline__ void load_whole(Vector (&spans)[kAtOnce], int first, int row, int column) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int place = of_span(places, first + i);
      const bool is_shared = has_shared && of_span(shared_tiles, first + i);
      spans[i] = place == kNowhere || is_shared ? Vector{} : load_sums(place, row, column);
    }
  }
  __device__ __forceinline__ void load_shared(Vector (&spans)[kAtOnce], SoftmaxState& own_state, int first,
                                              int row, int column) const {
    if (!has_shared) return;
#pragma unroll 1  // short code is faster than what it saves
    for (int i = 0; i < kAtOnce; ++i)
      if (const unsigned there = of_span(shared_tiles, first + i)) {
        SoftmaxState state;
        const Vector sums = merge_tiles(state, of_span(places, first + i), there, row, column);
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
          if (n == i) spans[n] = sums;
        if (lane == i) own_state = state;
      }
  }

  // Adds a round's spans up, every kSpanParts-th into the same part, and the parts in ascending order. Its
  // first spans are on their way while states are, which say what each counts.
  __device__ __forceinline__ void add_round(Vector& total, SoftmaxState& state, int count, int row,
                                            int column) const {
    Vector sum{};
    float weights[2];
    SoftmaxState added;
#pragma unroll 1
    for (int part = 0; part < min(count, kSpanParts); part += kAtOnce) {
      Vector parts[kAtOnce] = {};
#pragma unroll 1
      for (int first = part; first < count; first += kSpanParts) {
        Vector spans[kAtOnce];
        SoftmaxState low = kNoKeys, high = kNoKeys;
        load_whole(spans, first, row, column);
#pragma unroll 1
        for (int half = 0; first == 0 && half * 32 < count; ++half)
          (half ? high : low) = find_state(half, row);
        load_shared(spans, low, first, row, column);
        if (first == 0) added = weigh_spans(weights, low, high);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float weight = of_span(weights, first + i);
#pragma unroll
          for (int c = 0; c < Columns::kCount; ++c)
            parts[i].values[c] = fmaf(spans[i].values[c], weight, parts[i].values[c]);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int c = 0; c < Columns::kCount; ++c) sum.values[c] += parts[i].values[c];
    }
    const Merge merge = Merge::of(state, added);
    state = merge.state;
#pragma unroll
    for (int c = 0; c < Columns::kCount; ++c) total.values[c] = merge.apply(total.values[c], sum.values[c]);
  }

  // A row's sums in the lane's columns, and its state.
  __device__ __forceinline__ Vector combine(SoftmaxState& state, int row, int column) {
    Vector total{};
    state = kNoKeys;
#pragma unroll 1
    for (int next = first_round(); next * kRoundSpans < visited.end; next = visited.next_round(next)) {
      find_places(next);
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

}  // namespace ortolan::cuda
