// How a block walks along its piece of decode attention's line of tiles.
#pragma once

#include "decode_plan.cuh"
#include "ptx.cuh"

namespace ortolan::cuda {

// Inclusive prefix sum over a warp.
__device__ __forceinline__ int sum_before(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// Entries that may hold rows: those of row tiles that some sequence reaches. For a whole block.
__device__ __forceinline__ int count_entries(const SwaAttentionParams& params, const DecodeShape& shape) {
  if (shape.row_tiles == 1) return shape.entries;
  __shared__ int most_rows;
  if (threadIdx.x == 0) most_rows = 0;
  __syncthreads();
  for (int n = threadIdx.x; n < params.packing.num_sequences; n += blockDim.x) {
    const int tokens = static_cast<int>(params.packing.count(n));
    if (tokens <= kDecodeTokens) atomicMax(&most_rows, tokens * shape.group);
  }
  __syncthreads();
  return (most_rows + shape.entry_rows - 1) / shape.entry_rows * shape.pairs;
}

// Tiles before each entry, in shared memory; for a whole block.
__device__ __forceinline__ void count_tiles(const SwaAttentionParams& params, const DecodeShape& shape,
                                            int* starts) {
  __shared__ int warp_totals[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int entries = count_entries(params, shape);
  int before = 0;
  for (int first = 0; first < entries; first += blockDim.x) {
    const bool one_warp = entries - first <= 32;
    if (one_warp && warp > 0) break;
    const int index = first + static_cast<int>(threadIdx.x);
    const int tiles = index < entries ? DecodeEntry::of(params, shape, index).tiles.count() : 0;
    int sum = before + sum_before(tiles, lane);
    if (!one_warp) {
      if (lane == 31) warp_totals[warp] = sum;
      __syncthreads();
      const int total = sum_before(lane < warps ? warp_totals[lane] - before : 0, lane);
      if (warp > 0) sum += __shfl_sync(~0u, total, warp - 1);
      before += __shfl_sync(~0u, total, 31);
      __syncthreads();
    }
    if (index < entries) starts[index + 1] = sum;
  }
  if (threadIdx.x == 0) starts[0] = 0;
  __syncthreads();
  const int total = starts[entries];
  for (int index = entries + threadIdx.x; index < shape.entries; index += blockDim.x)
    starts[index + 1] = total;
  __syncthreads();
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
  __device__ __forceinline__ int key_tile() const { return of.tiles.at(number); }
};

// The span that a tile belongs to, as one block sees it.
struct DecodeSpan {
  int index = 0;
  SpanTiles tiles{};
  bool is_whole = false;  // the block holds all of it
  int owner = 0;          // the block that holds its first tile
  int number = 0;         // among those of the entry

  // Moves on to the span of the cursor's tile; `begin` and `end` bound the block's piece of the line.
  template <typename Line>
  __device__ __forceinline__ void settle(const DecodeCursor& cursor, bool is_new, const Line& line, int begin,
                                         int end, int max_spans) {
    if (!is_new && cursor.number < tiles.end) return;
    index = cursor.key_tile() / kSpanTiles;
    tiles = SpanTiles::of(cursor.of.tiles, index);
    const int start = cursor.tile - cursor.number;
    is_whole = start + tiles.begin >= begin && start + tiles.end <= end;
    owner = start + tiles.begin >= begin ? static_cast<int>(blockIdx.x) : line.owner(start + tiles.begin);
    number = span_number(cursor.of.tiles, index, max_spans);
  }
};

}  // namespace ortolan::cuda
