// How a block walks along its piece of decode attention's line of tiles.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "spans.cuh"

namespace ortolan::cuda {

// Hands each index in 0 .. items to `store`, with its count and the sum of counts up to it; for a whole
// block.
template <typename Count, typename Store>
__device__ __forceinline__ void sum_up(int items, const Count& count, const Store& store) {
  __shared__ int warp_totals[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int before = 0;
#pragma unroll 1
  for (int first = 0; first < items; first += blockDim.x) {
    const bool one_warp = items - first <= 32;
    if (one_warp && warp > 0) break;
    const int index = first + static_cast<int>(threadIdx.x);
    const int own = index < items ? count(index) : 0;
    int sum = before + inclusive_sum(own, lane);
    if (!one_warp) {
      if (lane == 31) warp_totals[warp] = sum;
      __syncthreads();
      const int total = inclusive_sum(lane < warps ? warp_totals[lane] - before : 0, lane);
      if (warp > 0) sum += __shfl_sync(~0u, total, warp - 1);
      before += __shfl_sync(~0u, total, 31);
      __syncthreads();
    }
    if (index < items) store(index, own, sum);
  }
}

// Numbers the row tiles that hold rows; returns how many. For a whole block. Row boundaries that do not rise
// may ask for more than there is room for: those are not numbered.
__device__ __forceinline__ int count_strips(const SwaAttentionParams& params, const DecodeShape& shape,
                                            int* holders) {
  __shared__ int counted;
  const auto row_tiles = [&](int sequence) {
    const auto tokens = static_cast<int>(params.packing.count(sequence));
    if (tokens <= 0 || tokens > shape.most_tokens) return 0;
    return (tokens * shape.group + shape.entry_rows - 1) / shape.entry_rows;
  };
  sum_up(shape.sequences, row_tiles, [&](int sequence, int tiles, int sum) {
    const int end = min(sum, shape.counted_strips);
    int holder = sequence;
#pragma unroll 1
    for (int strip = sum - tiles; strip < end; ++strip, holder += shape.sequences) holders[strip] = holder;
    if (sequence == shape.sequences - 1) counted = end;
  });
  __syncthreads();
  return counted;
}

// A fold of values that each thread has; for a whole block, in two steps with a barrier between.
struct BlockFold {
  int* of_warps;  // [32], in shared memory
  bool is_sum;    // else the largest, of values that are not negative

  __device__ __forceinline__ int of_warp(int value) const {
    return is_sum ? __reduce_add_sync(~0u, value) : __reduce_max_sync(~0u, value);
  }
  __device__ __forceinline__ void add(int value) const {
    value = of_warp(value);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  }
  __device__ __forceinline__ int result() const {
    const int lane = threadIdx.x % 32;
    return of_warp(lane < static_cast<int>(blockDim.x) / 32 ? of_warps[lane] : 0);
  }
};

struct CountedTiles {
  int strips;  // that have rows, where strips are counted
  Cut cut;
};

// Tiles before each entry, in shared memory, and holders of strips behind them; for a whole block. `lengths`:
// of sequences, where they have been read.
__device__ __forceinline__ CountedTiles count_tiles(const SwaAttentionParams& params,
                                                    const DecodeShape& shape, int* starts,
                                                    const EntryLengths* lengths = nullptr) {
  if (shape.sequences == 1 && shape.row_tiles == 1 &&
      params.past_len.head_stride == 0) {  // entries are alike
    const KeyTiles tiles = DecodeEntry::of(params, shape, 0, nullptr, lengths).tiles;
    LineCounts counts{};
    counts.add(shape, tiles, shape.entries);
    for (int index = threadIdx.x; index <= shape.entries; index += blockDim.x)
      starts[index] = index * tiles.count();
    __syncthreads();
    return {0, counts.cut(shape)};
  }
  __shared__ int of_warps[32];
  const BlockFold fold{of_warps, !shape.own_entries};
  int* holders = starts + shape.entries + 1;
  const int strips = shape.counted_strips ? count_strips(params, shape, holders) : 0;
  const int entries = shape.counted_strips ? strips * shape.kv_heads : shape.entries;
  LineCounts own{};  // of the thread's entries
  sum_up(
      entries,
      [&](int index) {
        const KeyTiles tiles = DecodeEntry::of(params, shape, index, holders, lengths).tiles;
        own.add(shape, tiles, 1);
        return tiles.count();
      },
      [&](int index, int, int sum) { starts[index + 1] = sum; });
  if (shape.cuts()) fold.add(shape.own_entries ? own.most_tiles : own.spans);
  if (threadIdx.x == 0) starts[0] = 0;
  __syncthreads();
  const int total = starts[entries];
#pragma unroll 1
  for (int index = entries + threadIdx.x; index < shape.entries; index += blockDim.x)
    starts[index + 1] = total;
  Cut cut = Cut::kAnywhere;
  if (shape.cuts()) {
    const int result = fold.result();
    cut = LineCounts{total, result, result}.cut(shape);
  }
  __syncthreads();
  return {strips, cut};
}

// Leaves what a block has counted to the combine kernel; for a whole block.
__device__ __forceinline__ void store_counts(const DecodeShape& shape, const DecodeWorkspace& workspace,
                                             const int* starts, const CountedTiles& counted) {
  const int strips = counted.strips;
  if (threadIdx.x == 0) *workspace.cut = counted.cut;
#pragma unroll 1
  for (int i = threadIdx.x; i <= shape.entries; i += blockDim.x) workspace.starts[i] = starts[i];
#pragma unroll 1
  for (int strip = threadIdx.x; strip < shape.counted_strips; strip += blockDim.x) {
    const int place = shape.entries + 1 + strip, holder = strip < strips ? starts[place] : -1;
    workspace.starts[place] = holder;
    if (strip < strips && holder < shape.sequences)
      workspace.first_strips[holder] = strip;  // its first row tile
  }
}

// Counts tiles, and waits for the kernel in front; for a whole block. With a place for `guessed` lengths it
// counts by what is there, and does not wait: see LineCheck.
__device__ __forceinline__ CountedTiles count_and_wait(const SwaAttentionParams& params,
                                                       const DecodeShape& shape, int* starts,
                                                       EntryLengths* guessed = nullptr) {
  if (guessed) {
#pragma unroll 1
    for (int sequence = threadIdx.x; sequence < shape.sequences; sequence += blockDim.x)
      guessed[sequence] = EntryLengths::guess(params, sequence);
    __syncthreads();
  } else if (!shape.is_behind) {
    wait_for_previous_kernel();
  }
  const CountedTiles counted = count_tiles(params, shape, starts, guessed);
  if (shape.is_behind) wait_for_previous_kernel();  // what the step was given was there before
  return counted;
}

// A place on the line of tiles, the stage that holds the tile and the buffer of its sums; all move forward.
struct DecodeCursor {
  int tile;            // on the line
  bool is_new = true;  // whether the tile is the first of its entry, or of the block
  int entry = 0;
  int number = 0;  // of the tile among those of its entry
  int end = 0;     // of the entry on the line
  RingPlace stage;
  RingPlace buffer;
  DecodeEntry of{};

  // Looks the entry up where it is new; returns whether it was. Line: DecodeLine or ClusterLine.
  template <typename Line>
  __device__ __forceinline__ bool settle(const SwaAttentionParams& params, const DecodeShape& shape,
                                         const Line& line) {
    if (!is_new) return false;
    entry = line.entry_of(tile);
    number = tile - line.first(entry);
    end = line.end(entry);
    of = line.entry(params, shape, entry);
    is_new = false;
    return true;
  }
  __device__ __forceinline__ void advance(const DecodeShape& shape) {
    ++number;
    is_new = ++tile == end;
    stage.advance(shape.stages);
    buffer.advance(shape.buffers);
  }
  // Passes by tiles of one entry.
  __device__ __forceinline__ void skip(int tiles) {
    number += tiles;
    tile += tiles;
    is_new = tile == end;
  }
  __device__ __forceinline__ int key_tile() const { return of.tiles.at(number); }
};

// The span that a tile belongs to, as one block sees it.
struct DecodeSpan {
  int index = 0;
  SpanTiles tiles{};
  bool is_merged = false;  // the block holds its first tiles, and merges what it holds
  bool is_whole = false;   // and so all of it
  int end = 0;             // order number behind the last tile that the block holds
  int owner = 0;           // the block that holds its first tile
  int number = 0;          // among those of the entry

  // Moves on to the span of the cursor's tile; `first` and `behind` bound the block's piece of the line.
  template <typename Line>
  __device__ __forceinline__ void settle(const DecodeCursor& cursor, bool is_new, const Line& line, int first,
                                         int behind, const DecodeShape& shape) {
    if (!is_new && cursor.number < tiles.end) return;
    index = cursor.key_tile() / shape.span_tiles;
    tiles = SpanTiles::of(cursor.of.tiles, index, shape.span_tiles);
    const int start = cursor.tile - cursor.number;
    is_merged = start + tiles.begin >= first;
    end = min(tiles.end, behind - start);
    is_whole = is_merged && end == tiles.end;
    owner = is_merged ? static_cast<int>(blockIdx.x) : line.owner(start + tiles.begin);
    number = span_number(cursor.of.tiles, index, shape.span_tiles, shape.max_spans);
  }
};

// Calls f(cursor, span, count) for the runs of tiles in a block's piece of the line: what it merges of a
// span, and single tiles, whose sums are handed on tile by tile.
template <typename Line, typename Function>
__device__ __forceinline__ void each_run(const SwaAttentionParams& params, const DecodeShape& shape,
                                         const Line& line, int begin, int end, const Function& f) {
  DecodeCursor cursor{.tile = begin};
  while (cursor.tile < end) {
    cursor.settle(params, shape, line);
    DecodeSpan span;
    span.settle(cursor, true, line, begin, end, shape);
    const int count = span.is_merged ? span.end - cursor.number : 1;
    f(cursor, span, count);
    cursor.skip(count);
  }
}

}  // namespace ortolan::cuda
