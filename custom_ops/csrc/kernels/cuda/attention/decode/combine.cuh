// Merges decode attention's partial sums, in the order that plan.cuh fixes.
//
// One block per row of an entry and kColumns columns. Threads own four columns; kColumns / 4 of them rebuild
// a span at a time: what was handed on whole, or its tiles, in ascending order. Then the spans of a round
// (fixed by key position) are brought to their common maximum and added up, every eighth by the same warp,
// and the rounds are merged one by one.
#pragma once

#include "cursor.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "received.cuh"
#include "spans.cuh"

namespace ortolan::cuda {

// With few entries it is faster to count their tiles again than to read what the kernel before has counted.
constexpr int kCountedEntries = 128;
__host__ __device__ __forceinline__ bool counts_again(const DecodeShape& shape) {
  return !shape.counted_strips && shape.entries <= kCountedEntries;
}

// Partial sums of a row in four columns.
struct PartialSum {
  SoftmaxState state = kNoKeys;
  float4 sums{};

  __device__ __forceinline__ void merge(const PartialSum& other) {
    const Merge merge = Merge::of(state, other.state);
    state = merge.state;
    apply(merge, other.sums);
  }
  __device__ __forceinline__ void apply(const Merge& merge, const float4& other) {
    sums = {merge.apply(sums.x, other.x), merge.apply(sums.y, other.y), merge.apply(sums.z, other.z),
            merge.apply(sums.w, other.w)};
  }
};

// One row of an entry, as its partial sums were left.
template <int kHeadSize, typename Line>
struct PartialRow {
  static constexpr bool kOfCluster = Line::kOfCluster;

  const DecodeWorkspace& workspace;
  const Line& line;
  const KeyTiles& tiles;
  int entry;
  int row;
  int column;               // of the thread
  ReceivedUnit received{};  // where a cluster's blocks send their sums

  __device__ __forceinline__ int start() const { return line.first(entry); }
  // Order number behind the owner's last tile.
  __device__ __forceinline__ int held(int owner) const { return line.begin(owner + 1) - start(); }
  __device__ __forceinline__ bool is_whole(const SpanTiles& span, int owner) const {
    return line.snaps || span.end <= held(owner);
  }
  // Whether blocks hand on nothing but whole spans.
  __device__ __forceinline__ bool are_all_whole() const {
    return !kOfCluster && (line.snaps || workspace.span_tiles.shift == 0);
  }
  // Whether the entry visits no other span than `first`.
  __device__ __forceinline__ bool is_only(const SpanTiles& first) const {
    return first.end - first.begin == tiles.count();
  }
  // Whether one block summed the whole entry and stored the output; `first`: the entry's first span.
  __device__ __forceinline__ bool is_stored(const SpanTiles& first) const {
    return is_only(first) && is_whole(first, line.owner(start()));
  }
  __device__ __forceinline__ void load(PartialSum& sum, int64_t place) const {
    const int64_t source = place * workspace.rows + row;
    sum.state = workspace.states[source];
    sum.sums = *reinterpret_cast<const float4*>(workspace.sums + source * kHeadSize + column);
  }
  // Of a span that was handed on whole.
  __device__ __forceinline__ PartialSum whole_span(int index) const {
    PartialSum sum;
    const SpanTiles span = SpanTiles::of(tiles, index, workspace.span_tiles);
    const int number = span_number(tiles, index, workspace.span_tiles, workspace.max_spans);
    if (span.begin < span.end) load(sum, workspace.span_place(entry, number));
    return sum;
  }
  // The same where all tiles' sums were sent to this block; for whole groups of kMostSpanTiles lanes.
  __device__ __forceinline__ PartialSum sum_received_span(const SpanTiles& span) const {
    const int count = span.end - span.begin, own = SpanFactors::own();
    float4 parts[kMostSpanTiles];
#pragma unroll
    for (int t = 0; t < kMostSpanTiles; ++t)
      parts[t] = t < count ? load_shared_quad(received.sum(span.begin + t)) : float4{};
    const auto factors = SpanFactors::of_group(own < count ? received.state(span.begin + own) : kNoKeys);
    PartialSum sum;
#pragma unroll
    for (int t = 0; t < kMostSpanTiles; ++t) {
      const Merge merge = factors.merge(t);
      sum.state.total = merge.apply(sum.state.total, factors.total(t));
      sum.apply(merge, parts[t]);
    }
    sum.state.maximum = factors.maximum();
    return sum;
  }
  // Spans of both kinds, whole and not, are loaded at once: threads of a warp have some of each.
  __device__ __forceinline__ PartialSum sum_span(int index) const {
    PartialSum sum;
    const PowerOfTwo span_tiles = workspace.span_tiles;
    const SpanTiles span = SpanTiles::of(tiles, index, span_tiles);
    if (span.begin >= span.end) return sum;
    if constexpr (Line::kOfCluster)
      if (line.sends) return sum_received_span(span);
    const int owner = line.owner(start() + span.begin);
    const bool whole = is_whole(span, owner);
    const int others = held(owner);  // those before are merged, where the first one's sums would be
    const int first = index << span_tiles.shift;
    const int number = span_number(tiles, index, span_tiles, workspace.max_spans);
    const int64_t place = whole ? workspace.span_place(entry, number) : workspace.tile_place(owner, first);
    PartialSum parts[kMostSpanTiles];
#pragma unroll
    for (int t = 0; t < kMostSpanTiles; ++t) {
      const int tile = first + t;
      const int rank = tiles.rank(tile);
      const bool is_part =
          t < 1 << span_tiles.shift && tiles.rank(tile + 1) > rank && (rank == span.begin || rank >= others);
      if (whole ? t == 0 : is_part) load(parts[t], place + t);
    }
    if (whole) return parts[0];
#pragma unroll
    for (int t = 0; t < kMostSpanTiles; ++t) sum.merge(parts[t]);
    return sum;
  }
};

// The spans of one round, and the sums of its parts.
struct SpanRound {
  SoftmaxState* states;  // [spans]
  float* sums;           // [spans, columns]
  float* parts;          // [kSpanParts, columns]

  static __host__ __device__ constexpr int bytes(int spans, int columns) {
    return (spans + kSpanParts) * columns * static_cast<int>(sizeof(float)) +
           spans * static_cast<int>(sizeof(SoftmaxState));
  }
  static __device__ __forceinline__ SpanRound of(unsigned char* memory, int spans, int columns) {
    auto* sums = reinterpret_cast<float*>(memory);
    float* parts = sums + spans * columns;
    return {reinterpret_cast<SoftmaxState*>(parts + kSpanParts * columns), sums, parts};
  }

  // Maximum and denominator of all, and each lane's two weights; the same in every warp.
  __device__ __forceinline__ SoftmaxState weigh(float (&weights)[2], int count, int lane) const {
    SoftmaxState low = kNoKeys, high = kNoKeys;
    if (lane < count) low = states[lane];
    if (lane + 32 < count) high = states[lane + 32];
    return weigh_spans(weights, low, high);
  }

  // Adds every kSpanParts-th span, for the columns of a warp.
  template <int kColumns>
  __device__ __forceinline__ void add_part(const float (&weights)[2], int part, int count, int lane) const {
    float added[(kColumns + 31) / 32] = {};
#pragma unroll
    for (int i = 0; i < kRoundSpans / kSpanParts; ++i) {
      const int span = part + i * kSpanParts;
      if (span >= count) break;
      const float weight = __shfl_sync(~0u, weights[i / (32 / kSpanParts)], span % 32);
#pragma unroll
      for (int c = 0; c < kColumns / 32; ++c)
        added[c] = fmaf(sums[span * kColumns + c * 32 + lane], weight, added[c]);
    }
#pragma unroll
    for (int c = 0; c < kColumns / 32; ++c) parts[part * kColumns + c * 32 + lane] = added[c];
  }
};

// Brings the sums of a round's spans to shared memory, kAtOnce of each thread in flight; for a whole block.
template <int kSpanThreads, int kAtOnce, typename Load>
__device__ __forceinline__ void load_round(const SpanRound& spans, const VisitedSpans& visited, int round,
                                           int count, const Load& load) {
  const int step = blockDim.x / kSpanThreads, column = threadIdx.x % kSpanThreads;
#pragma unroll 1
  for (int first = threadIdx.x / kSpanThreads; first < count; first += kAtOnce * step) {
    PartialSum sums[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int n = first + i * step, span = round * kRoundSpans + n;
      if (n < count && visited.hold(span)) sums[i] = load(span);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int n = first + i * step;
      if (n >= count) break;
      reinterpret_cast<float4*>(spans.sums)[n * kSpanThreads + column] = sums[i].sums;
      if (column == 0) spans.states[n] = sums[i].state;
    }
  }
}

// Merges the partial sums of kColumns columns of a row and stores the output; for a whole block.
template <typename Element, int kColumns, typename Partial>
__device__ __forceinline__ void combine_row(const SwaAttentionParams& params, const DecodeShape& shape,
                                            const DecodeEntry& entry, const Partial& partial,
                                            const SpanRound& spans, int spans_at_once, int first_column) {
  constexpr int kSpanThreads = kColumns / 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const VisitedSpans visited = VisitedSpans::of(entry.tiles, shape.span_tiles);
  const int first_span = entry.tiles.at(0) / shape.span_tiles;
  const bool is_only = partial.is_only(SpanTiles::of(entry.tiles, first_span, shape.span_tiles));
  SoftmaxState state = kNoKeys;
  float total = 0;
  for (int round = visited.next_round(-1); round * kRoundSpans < visited.end;
       round = visited.next_round(round)) {
    const int count = min(spans_at_once, visited.end - round * kRoundSpans);
    if (partial.are_all_whole())
      load_round<kSpanThreads, 4>(spans, visited, round, count,
                                  [&](int span) { return partial.whole_span(span); });
    else
      load_round<kSpanThreads, 1>(spans, visited, round, count,
                                  [&](int span) { return partial.sum_span(span); });
    __syncthreads();
    if (is_only) {  // all that a round would do to it is to drop the sign of a zero
      const int n = first_span - round * kRoundSpans;
      state = spans.states[n];
      total = spans.sums[n * kColumns + threadIdx.x % kColumns] + 0.0f;
      break;
    }
    float weights[2];
    const SoftmaxState added = spans.weigh(weights, count, lane);
    for (int part = warp; part < kSpanParts; part += blockDim.x / 32)
      spans.add_part<kColumns>(weights, part, count, lane);
    __syncthreads();
    float added_sum = 0;
#pragma unroll
    for (int part = 0; part < kSpanParts; ++part)
      added_sum += spans.parts[part * kColumns + threadIdx.x % kColumns];
    const Merge merge = Merge::of(state, added);
    state = merge.state;
    total = merge.apply(total, added_sum);
  }
  if (threadIdx.x < kColumns)
    entry.store_row<Element>(params, shape, partial.row, first_column + static_cast<int>(threadIdx.x), state,
                             total);
}

// The sequence of a token; for whole warps. Where each has one, it is found by the first guess.
__device__ __forceinline__ int find_sequence(const Packing& packing, int64_t token) {
  const auto holds = [&](int64_t sequence) {
    return sequence < packing.num_sequences && packing.first(sequence) <= token &&
           token < packing.first(sequence) + packing.count(sequence);
  };
  if (holds(token)) return static_cast<int>(token);
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = 0; first < packing.num_sequences; first += 32)
    if (const unsigned found = __ballot_sync(~0u, holds(first + lane))) return first + __ffs(found) - 1;
  return -1;
}

// What a block of the combine kernel merges.
struct CombinedRow {
  DecodeEntry entry;
  int index;  // of the entry, where its strip is not counted
  int row;    // of the entry, which may have fewer

  static __device__ __forceinline__ CombinedRow of_token(const SwaAttentionParams& params,
                                                         const DecodeShape& shape, int token, int head) {
    const int sequence = find_sequence(params.packing, token);
    if (sequence < 0 || params.packing.count(sequence) > shape.most_tokens) return {};
    const int kv_head = shape.by_group.divide(head);
    const int sequence_row = (token - static_cast<int>(params.packing.first(sequence))) * shape.group + head -
                             kv_head * shape.group;
    const int row_tile = sequence_row / shape.entry_rows;
    return {DecodeEntry::of(params, shape, sequence, row_tile, kv_head),
            (row_tile * shape.sequences + sequence) * shape.kv_heads + kv_head,
            sequence_row - row_tile * shape.entry_rows};
  }
  // Where strips are counted, for once the kernel before has done so.
  static __device__ __forceinline__ CombinedRow of_entry(const SwaAttentionParams& params,
                                                         const DecodeShape& shape, const int* holders,
                                                         int index, int row) {
    return {DecodeEntry::of(params, shape, index, holders), index, row};
  }
  // The entry's number with the strip that the kernel before has counted for its first row; false: it has
  // none.
  __device__ __forceinline__ bool find_strip(const DecodeShape& shape, const int* first_strips) {
    const int strip = first_strips[entry.sequence] + entry.first_row / shape.entry_rows;
    index = strip * shape.kv_heads + entry.kv_head;
    return 0 <= strip && strip < shape.counted_strips;
  }
};

// One row and kColumns columns of it; for a whole block. `kLoops`: see below.
template <typename Element, int kHeadSize, int kColumns, bool kLoops>
__device__ __forceinline__ void combine_own(const SwaAttentionParams& params, const DecodeShape& shape,
                                            const DecodeWorkspace& workspace, CombinedRow own,
                                            const SpanRound& spans, int spans_at_once, bool by_token) {
  constexpr int kSpanThreads = kColumns / 4;
  __shared__ int counted[kCountedEntries + 1];
  const int first_column = blockIdx.z * kColumns;
  if (own.row >= own.entry.rows) {
    if (is_first_block()) wait_for_previous_kernel();
    return;
  }
  const DecodeEntry& entry = own.entry;
  const bool counts = !kLoops && counts_again(shape);
  Cut cut = counts ? count_tiles(params, shape, counted).cut : Cut::kAnywhere;
  const SpanTiles first_span =
      SpanTiles::of(entry.tiles, entry.tiles.at(0) / shape.span_tiles, shape.span_tiles);
  if (cut == Cut::kWithEntries && !is_first_block()) return;  // all are stored
  wait_for_previous_kernel();
  if (shape.counted_strips && by_token && !own.find_strip(shape, workspace.first_strips)) return;

  if (!counts) cut = workspace.read_cut(shape);
  const DecodeLine line(counts ? counted : workspace.starts, shape, cut);
  const PartialRow<kHeadSize, DecodeLine> partial{
      workspace, line,    entry.tiles,
      own.index, own.row, first_column + static_cast<int>(threadIdx.x) % kSpanThreads * 4};
  if (partial.is_stored(first_span)) return;
  combine_row<Element, kColumns>(params, shape, entry, partial, spans, spans_at_once, first_column);
}

// Grid: (entries, their rows) or, `by_token`, (tokens, query heads), and groups of columns. `spans_at_once`:
// of a round, at most. kLoops: strips are counted, and there may be far fewer entries than the host must
// expect: blocks take one after another, and none has to start for what is not there.
template <typename Element, int kHeadSize, int kColumns, int kThreads, bool kLoops>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    decode_combine_kernel(const __grid_constant__ SwaAttentionParams params,
                          const __grid_constant__ DecodeShape shape,
                          const __grid_constant__ DecodeWorkspace workspace, int spans_at_once,
                          bool by_token) {
  launch_dependents();  // who comes next waits for this kernel, and so for the one before
  if (is_in_vain(params, shape)) return;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const SpanRound spans = SpanRound::of(shared_memory, spans_at_once, kColumns);
  const int* holders = workspace.starts + shape.entries + 1;
  const auto row = static_cast<int>(blockIdx.y);
  if constexpr (!kLoops) {  // until the wait only what the kernel before had waited for is read
    const CombinedRow own = by_token ? CombinedRow::of_token(params, shape, blockIdx.x, row)
                                     : CombinedRow::of_entry(params, shape, holders, blockIdx.x, row);
    combine_own<Element, kHeadSize, kColumns, kLoops>(params, shape, workspace, own, spans, spans_at_once,
                                                      by_token);
    return;
  }
  wait_for_previous_kernel();
  for (auto index = static_cast<int>(blockIdx.x); index < shape.entries; index += gridDim.x) {
    if (holders[shape.by_kv_heads.divide(index)] < 0) return;  // numbers have no gaps
    const CombinedRow own = CombinedRow::of_entry(params, shape, holders, index, row);
    combine_own<Element, kHeadSize, kColumns, kLoops>(params, shape, workspace, own, spans, spans_at_once,
                                                      false);
    __syncthreads();  // what the row has read may be overwritten
  }
}

}  // namespace ortolan::cuda
