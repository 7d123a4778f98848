// How bytes.cuh shares its work, and the pairs' inputs as bytes in shared memory: each warp rounds those of
// its own slices.
//
// The inputs that meet a slice's codes, 256 columns, become 16-bit numbers with a power of two of their own:
// what has 8 bits and is no smaller than a 128th of the largest stays as it is. Each number is two bytes.
#pragma once

#include "instances.h"
#include "kernels/cuda/low_bit/bytes_inputs.cuh"

namespace ortolan::cuda {

// Units of 16 lines of weights by 128 bytes of codes, a slice of the columns.
struct ByteExpertPlan {
  static constexpr int kLines = 16;
  static constexpr int kRowBytes = 128;
  static constexpr int kColumns = 256;
  static constexpr int kCodesBytes = kLines * kRowBytes;
  static constexpr int kMostWarps = 8;
  static constexpr int kMostPairs = 4;  // of a tensor-core product
  static constexpr int kMostDepth = 4;

  int tiles;          // of 16 lines, of an expert
  int outputs;        // of a tile, a power of two
  int outputs_shift;  // its logarithm
  int slices;         // units of a tile
  int span;           // warps that share a tile
  int teams;          // of so many warps, each at a tile of its own
  int rounds;         // slices of a warp, at most
  int depth;          // units of a warp on their way
  int turn_tiles;     // of a block, whose parts wait in shared memory for the end of their turn
  int pairs;          // that share a pass over the weights, at most
  int row_bytes;      // of codes
  int scale_row_bytes, zero_row_bytes;
  int line_words;       // of 4 bytes, which hold a line's scales and zero points of a slice
  int group_shift;      // slices that share a group, a power of two
  int slice_groups;     // groups that a slice holds, or 1
  int piece_shift;      // pieces of 32 columns that share a group within a slice, likewise
  int later_row;        // rows from a tile's first 8 lines to its others: gates and factors, or 8
  int64_t later_bytes;  // of codes, likewise

  __host__ __device__ int warps() const { return span * teams; }
  __host__ __device__ int stage_bytes() const { return kCodesBytes + line_words * kLines * 4; }
  __host__ __device__ int turn_parts() const { return turn_tiles * span * pairs * kLines; }
  __device__ __forceinline__ int first_group(int slice) const {
    return (slice >> group_shift) * slice_groups;
  }
};

struct ByteExpertParams {
  StackedWeight weights;
  ExpertStep step;
  ExpertScratch scratch;
  ByteExpertPlan plan;
  int num_outputs, num_inputs;
  float choice_share;  // 1 / K
  bool gated;          // gate_up, else down
  bool is_shared;      // pairs lie grouped by expert; else each has its own rows

  // Of a pair: exact, since there are fewer than 2^22.
  __device__ __forceinline__ int token_of(int pair) const {
    return static_cast<int>((static_cast<float>(pair) + 0.5f) * choice_share);
  }
};

// What a slice's numbers of a pair are worth.
struct alignas(16) SliceFacts {
  int sums[8];  // of the numbers that meet 16 bytes of codes each
  float unit;
};

// Of a pair and a slice: for each 64 columns two planes, of high bytes and of low ones, of four chunks of 16
// bytes. Lane 4 g + t loads chunk t: what its words of codes meet, eight of the first 32 columns, then of the
// others.
struct SliceBytes {
  static constexpr int kStep = 128, kPlane = 64;
  static constexpr int kBytes = 512;
  static constexpr int kAllBytes = kBytes + static_cast<int>(sizeof(SliceFacts));
};

// Where all of it lies in shared memory: rings, parts of two turns, inputs [warp, round, pair] with facts.
struct ByteExpertLayout {
  int parts, inputs, bytes;

  __host__ __device__ explicit ByteExpertLayout(const ByteExpertPlan& plan) {
    parts = plan.warps() * plan.depth * plan.stage_bytes();
    inputs = parts + 2 * plan.turn_parts() * 4;
    bytes = inputs + plan.warps() * plan.rounds * plan.pairs * SliceBytes::kAllBytes;
  }
};

__device__ __forceinline__ void store_shared_8(uint32_t address, uint32_t first, uint32_t second) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};\n" ::"r"(address), "r"(first), "r"(second) : "memory");
}

// kSplit: the even columns of eight lie before the odd ones.
template <typename Element, bool kSplit>
struct SliceInputs {
  static constexpr int kAtOnce = 4;  // pieces of a warp on their way
  uint32_t bytes;                    // of the warp: [round, pair]
  SliceFacts* facts;                 // likewise
  int columns;                       // of a row
  int first_slice, span;             // of the warp
  int count;                         // of pieces, each of a slice and a pair
  int pairs;

  struct Pieces {
    uint4 words[kAtOnce];
  };
  // Starts to load some pieces; `row_of(n)`: the elements of pair n.
  template <typename RowOf>
  __device__ __forceinline__ Pieces fetch(int first, RowOf row_of) const {
    Pieces pieces{};
    int round = first / pairs, pair = first - round * pairs;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int column =
          (first_slice + round * span) * ByteExpertPlan::kColumns + static_cast<int>(threadIdx.x % 32) * 8;
      if (first + n < count && column < columns)
        pieces.words[n] = *reinterpret_cast<const uint4*>(row_of(pair) + column);
      if (++pair == pairs) pair = 0, ++round;
    }
    return pieces;
  }
  __device__ __forceinline__ void store(int i, const uint4& piece) const {
    const int lane = threadIdx.x % 32;
    const uint32_t words[] = {piece.x, piece.y, piece.z, piece.w};
    float values[8];
    uint32_t most = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 pair = Half<Element>::unpack(words[n]);
      const int first = kSplit ? 2 * n : 4 * (n % 2) + n / 2;  // ByteInputs lays even places first
      values[first] = pair.x;
      values[first + (kSplit ? 1 : 2)] = pair.y;
      most = __vmaxu2(most, words[n] & 0x7FFF7FFFu);
    }
    const uint32_t largest = __reduce_max_sync(0xFFFFFFFFu, max(most & 0xFFFFu, most >> 16));
    ByteInputs<8> numbers;
    numbers.round(values, Half<Element>::unpack(largest).x);
    const uint32_t chunk =
        bytes + i * SliceBytes::kBytes + lane / 8 * SliceBytes::kStep + lane % 4 * 16 + lane / 4 % 2 * 8;
    store_shared_8(chunk, numbers.high[0], numbers.high[1]);
    store_shared_8(chunk + SliceBytes::kPlane, numbers.low[0], numbers.low[1]);
    const int sum = fold_lanes<2, 1>(numbers.sum, Add());  // of 32 columns
    if (lane % 4 == 0) facts[i].sums[lane / 4] = sum;
    if (lane == 0) facts[i].unit = numbers.unit;
  }
  // Rounds all pieces, the first of which are on their way.
  template <typename RowOf>
  __device__ __forceinline__ void store_all(Pieces pieces, RowOf row_of) const {
    __syncwarp();  // some lanes may still read the last ones
#pragma unroll 1
    for (int i = 0; i < count;) {
      store(i, pieces.words[0]);
#pragma unroll
      for (int n = 0; n + 1 < kAtOnce; ++n) pieces.words[n] = pieces.words[n + 1];
      if (++i % kAtOnce == 0 && i < count) pieces = fetch(i, row_of);
    }
    __syncwarp();
  }
};

}  // namespace ortolan::cuda
