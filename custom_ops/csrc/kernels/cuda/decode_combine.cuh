// Merges decode attention's partial sums, in the order that decode_plan.cuh fixes.
//
// One block per query row, 16 warps. In rounds of some spans: a warp rebuilds segments (what was handed on
// whole, or the tiles of a segment that blocks shared), then threads own columns and merge segments into
// spans, and spans into the row. A span that was handed on whole stands in the place of its first segment:
// merging with nothing changes no bit.
#pragma once

#include "decode.cuh"
#include "packed_rows.cuh"

namespace ortolan::cuda {

template <int kBlockColumns>
struct CombineShape {
  static constexpr bool kIsNarrow = kBlockColumns == 32;
  static constexpr int kThreads = kIsNarrow ? 512 : 256;
  static constexpr int kColumns =
      kBlockColumns <= 128 ? 4 : kBlockColumns / 32;  // of a thread, while rebuilding
  static constexpr int kSegmentThreads = kBlockColumns / kColumns;
  static constexpr int kSpans = kIsNarrow ? 8 : 2;  // of a round
  static constexpr int kSegments = kSpans * kSpanSegments;
};

// One row of an entry, as its partial sums were left.
struct PartialRow {
  const DecodeWorkspace& workspace;
  const DecodeShape& shape;
  const DecodeLine& line;
  const KeyTiles& tiles;
  int entry;
  int row;
  int first_column;  // of the thread

  __device__ __forceinline__ int owner(int number) const { return line.owner(line.starts[entry] + number); }
  __device__ __forceinline__ bool is_whole(const TileRange& range, int owner) const {
    return line.starts[entry] + range.end <= line.begin(owner + 1);
  }
  __device__ __forceinline__ int64_t source(int64_t place) const { return place * shape.entry_rows + row; }
};

template <int kHeadSize, int kColumns>
struct SegmentSum {
  RowState state = kNoKeys;
  float sums[kColumns] = {};

  __device__ __forceinline__ void load(const PartialRow& row, int64_t place) {
    const int64_t source = row.source(place);
    state = row.workspace.states[source];
    const float* line = row.workspace.sums + source * kHeadSize + row.first_column;
#pragma unroll
    for (int c = 0; c < kColumns; c += 4)
      *reinterpret_cast<float4*>(&sums[c]) = *reinterpret_cast<const float4*>(line + c);
  }

  __device__ __forceinline__ void rebuild(const PartialRow& row, int segment) {
    const PartialPlaces places = PartialPlaces::of(row.shape);
    const int span = segment / kSpanSegments;
    const TileRange in_span = TileRange::of(row.tiles, span * kSpanTiles, kSpanTiles);
    if (in_span.begin >= in_span.end) return;
    const int span_owner = row.owner(in_span.begin);
    if (row.is_whole(in_span, span_owner)) {
      if (segment % kSpanSegments == 0)
        load(row, places.span(row.entry, span_number(row.tiles, span, row.shape.max_spans)));
      return;
    }
    const int first_tile = segment * kSegmentTiles;
    const TileRange in_segment = TileRange::of(row.tiles, first_tile, kSegmentTiles);
    if (in_segment.begin >= in_segment.end) return;
    const int segment_owner = row.owner(in_segment.begin);
    if (row.is_whole(in_segment, segment_owner)) return load(row, places.segment(span_owner, first_tile));
    SegmentSum pieces[kSegmentTiles];
#pragma unroll
    for (int t = 0; t < kSegmentTiles; ++t) {
      const int tile = first_tile + t;
      if (row.tiles.rank(tile + 1) > row.tiles.rank(tile))
        pieces[t].load(row, places.tile(segment_owner, tile));
    }
#pragma unroll
    for (int t = 0; t < kSegmentTiles; ++t) {
      const Merge merge = Merge::of(state, pieces[t].state);
      state = merge.state;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c] = merge.apply(sums[c], pieces[t].sums[c]);
    }
  }
};

template <typename Element, int kHeadSize, int kBlockColumns>
__global__ void __launch_bounds__(CombineShape<kBlockColumns>::kThreads)
    decode_combine_kernel(const __grid_constant__ SwaAttentionParams params,
                          const __grid_constant__ DecodeShape shape,
                          const __grid_constant__ DecodeWorkspace workspace) {
  using Shape = CombineShape<kBlockColumns>;
  __shared__ RowState segment_states[Shape::kSegments], span_states[Shape::kSpans];
  __shared__ __align__(16) float segment_sums[Shape::kSegments][kBlockColumns];
  __shared__ float span_sums[Shape::kSpans][kBlockColumns];
  const int head = blockIdx.y, token = blockIdx.x;
  const int block_column = blockIdx.z * kBlockColumns;
  const int part = threadIdx.x % Shape::kSegmentThreads * Shape::kColumns;

  const auto sequence = static_cast<int>(sequence_of(params.packing, token));
  if (sequence < 0 || params.packing.count(sequence) > kDecodeTokens)
    return;  // nobody's, or a prefill kernel's
  const int kv_head = head / shape.group;
  const int number =
      static_cast<int>(token - params.packing.first(sequence)) * shape.group + head % shape.group;
  const int index = (sequence * static_cast<int>(params.cache.num_kv_heads) + kv_head) * shape.row_tiles +
                    number / shape.entry_rows;
  const DecodeEntry entry = DecodeEntry::of(params, shape, index);
  // Until here only what the kernel before had waited for was read.
  wait_for_previous_kernel();
  launch_dependents();
  const DecodeLine line(workspace.starts, shape);
  const PartialRow row{workspace,          shape, line, entry.tiles, index, number % shape.entry_rows,
                       block_column + part};
  const int count = entry.tiles.count();
  const TileRange first_span =
      TileRange::of(entry.tiles, entry.tiles.at(0) / kSpanTiles * kSpanTiles, kSpanTiles);
  if (first_span.end - first_span.begin == count && row.is_whole(first_span, row.owner(0))) return;

  // Spans of the sinks, then of the window.
  const int sink_spans = (entry.tiles.sink_end + kSpanTiles - 1) / kSpanTiles;
  const int first_window_span = max(entry.tiles.begin / kSpanTiles, sink_spans);
  const int num_spans = sink_spans + (entry.tiles.end + kSpanTiles - 1) / kSpanTiles - first_window_span;
  const auto span_at = [&](int n) { return n < sink_spans ? n : first_window_span + n - sink_spans; };
  RowState state = kNoKeys;
  float sums[(kBlockColumns + Shape::kThreads - 1) / Shape::kThreads] =
      {};  // of columns threadIdx.x, + kThreads ..
  for (int first = 0; first < num_spans; first += Shape::kSpans) {
    const int spans = min(Shape::kSpans, num_spans - first);
    for (int n = threadIdx.x / Shape::kSegmentThreads; n < spans * kSpanSegments;
         n += Shape::kThreads / Shape::kSegmentThreads) {
      SegmentSum<kHeadSize, Shape::kColumns> segment;
      segment.rebuild(row, span_at(first + n / kSpanSegments) * kSpanSegments + n % kSpanSegments);
      if (part == 0) segment_states[n] = segment.state;
#pragma unroll
      for (int c = 0; c < Shape::kColumns; ++c) segment_sums[n][part + c] = segment.sums[c];
    }
    __syncthreads();
    for (int n = threadIdx.x; n < spans * kBlockColumns; n += Shape::kThreads) {
      const int span = n / kBlockColumns, column = n % kBlockColumns;
      RowState span_state = kNoKeys;
      float span_sum = 0;
#pragma unroll
      for (int s = 0; s < kSpanSegments; ++s) {
        const Merge merge = Merge::of(span_state, segment_states[span * kSpanSegments + s]);
        span_state = merge.state;
        span_sum = merge.apply(span_sum, segment_sums[span * kSpanSegments + s][column]);
      }
      if (column == 0) span_states[span] = span_state;
      span_sums[span][column] = span_sum;
    }
    __syncthreads();
    for (int span = 0; span < spans; ++span) {
      const Merge merge = Merge::of(state, span_states[span]);
      state = merge.state;
      for (int c = threadIdx.x; c < kBlockColumns; c += Shape::kThreads)
        sums[c / Shape::kThreads] = merge.apply(sums[c / Shape::kThreads], span_sums[span][c]);
    }
    __syncthreads();
  }

  const Denominator denominator = Denominator::of(state.total, state.maximum, params.sink_logits, head);
  if (params.lse && block_column == 0 && threadIdx.x == 0)
    params.lse[head * params.packing.num_tokens + token] = denominator.lse;
  auto* output = static_cast<Element*>(params.output) +
                 (static_cast<int64_t>(token) * params.num_heads + head) * params.cache.head_size;
  for (int c = threadIdx.x; c < kBlockColumns; c += Shape::kThreads)
    if (block_column + c < params.cache.head_size)
      output[block_column + c] = Element(sums[c / Shape::kThreads] * denominator.inverse);
}

}  // namespace ortolan::cuda
