// How bytes.cuh shares its work, and the tokens' inputs as pairs of bytes in shared memory.
#pragma once

#include "kernels/cuda/linear/gemv.cuh"
#include "kernels/low_bit_params.h"

namespace ortolan::cuda {

// How a launch shares the work: units of 16 lines of weights by 128 bytes of codes, a slice of the columns.
struct BytePlan {
  static constexpr int kLines = 16;
  static constexpr int kRowBytes = 128;  // of codes, in a unit
  static constexpr int kCodesBytes = kLines * kRowBytes;
  static constexpr int kMostWarps = 8;
  static constexpr int kMostThreads = 32 * kMostWarps;
  static constexpr int kMostDepth = 4;

  int blocks;        // which take tiles in turn
  int tiles;         // of 16 lines
  int slices;        // units of a tile
  int whole_slices;  // of 128 bytes
  int span;          // warps that share a tile
  int teams;         // of so many warps, each at a tile of its own
  int rounds;        // slices of a warp, at most
  int turn_tiles;    // of a block, whose parts wait in shared memory for the end of their turn
  int depth;         // units of a warp on their way
  int row_bytes;     // of codes
  int groups;        // of a row
  int group_shift;   // slices that share a group, a power of two
  int zero_row_bytes;
  bool paired;          // a slice has two groups
  int later_lines;      // rows from a tile's first 8 lines to its others: 8, or 0 between gates and factors
  int64_t later_bytes;  // of codes, likewise
  int tile_step;        // outputs from a team's tile to its next one
  int64_t tile_bytes;   // of codes, likewise
  int tokens_shift;     // 2^n tokens, or fewer
  float input_share;    // 1 / K

  __host__ __device__ int warps() const { return span * teams; }
  // Of all tokens' parts of a turn.
  __host__ __device__ int turn_parts(int tokens) const { return turn_tiles * span * tokens * kLines; }
  __device__ __forceinline__ int first_group(int slice) const {
    return paired ? 2 * slice : slice >> group_shift;
  }
};

struct ByteStreamParams {
  FusedLinearParams linear;
  LowBitWeight weight;
  BytePlan plan;
  GemvPass pass;
};

// What 128 bytes of codes are multiplied by, for a token: planes of high and of low bytes, and facts.
template <int kBits>
struct ByteSlice {
  static constexpr int kColumns = 1024 / kBits;
  static constexpr int kLaneColumns = kColumns / 32;
  static constexpr int kBytes = 2 * kColumns;
};
struct alignas(16) ByteFacts {
  float unit;   // what the slice's numbers are worth
  int sums[2];  // of the numbers of 128 columns
};

// Where all of it lies in shared memory: rings, inputs [warp, round, token], facts likewise, sums of squares
// [warp, token], and parts of two turns.
template <int kBits, bool kZeros>
struct ByteLayout {
  static constexpr int kStageBytes = BytePlan::kCodesBytes + (kZeros ? 2 : 1) * BytePlan::kLines * 4;
  int inputs, facts, squares, parts, bytes;

  __host__ __device__ ByteLayout(const BytePlan& plan, int tokens) {
    const int warp_slices = plan.warps() * plan.rounds * tokens;
    inputs = (plan.warps() * plan.depth * kStageBytes + 127) / 128 * 128;
    facts = inputs + warp_slices * ByteSlice<kBits>::kBytes;
    squares = facts + warp_slices * static_cast<int>(sizeof(ByteFacts));
    parts = squares + plan.warps() * tokens * 4;
    bytes = parts + 2 * plan.turn_parts(tokens) * 4;
  }
};

// A lane's inputs of a slice as 16-bit numbers of a power of two. A number is 256 * high + low, bytes with a
// sign. Words of bytes: of int4 the even and the odd columns of eight, of int8 the four columns.
template <int kColumns>
struct ByteInputs {
  static constexpr int kWords = kColumns / 4;
  uint32_t high[kWords], low[kWords];
  float unit;  // the power of two
  int sum;     // of the lane's numbers

  // `largest`: magnitude among the columns that share the power. The largest number is at most 32639, which
  // two signed bytes hold.
  __device__ __forceinline__ void round(const float (&values)[kColumns], float largest) {
    const uint32_t exponent = max(__float_as_uint(largest * (32768.5f / 32639.0f)) >> 23, 19u);
    const float factor = __uint_as_float((268u - exponent) << 23);
    unit = __uint_as_float(exponent == 255 ? 0x7FFFFFFFu : (exponent - 14) << 23);
    // 1.5 * 2^23, whose last bits are units, and 128: bits 8 to 15 are the high byte.
    constexpr uint32_t kBase = 0x4B400080u;
    uint32_t numbers[kColumns];
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
      numbers[n] = __float_as_uint(fmaf(values[n], factor, __uint_as_float(kBase)));
    sum = static_cast<int>(0u - kColumns * kBase);
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) sum += static_cast<int>(numbers[n] + numbers[n + 1]);
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const auto number = [&](int n) { return numbers[kWords * n + word]; };
      const uint32_t first = __byte_perm(number(0), number(1), 0x5410);
      const uint32_t second = __byte_perm(number(2), number(3), 0x5410);
      high[word] = __byte_perm(first, second, 0x7531);
      low[word] = __byte_perm(first, second, 0x6420) ^ 0x80808080u;
    }
  }
};

// Waits until the oldest of `depth` groups of copies, 2 to 4, is there.
__device__ __forceinline__ void wait_for_oldest(int depth) {
  if (depth == 2)
    copy_async_wait<1>();
  else if (depth == 3)
    copy_async_wait<2>();
  else
    copy_async_wait<3>();
}

__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(address), "r"(word) : "memory");
}
// Where chunk `n` of 64 bytes of a plane lies in its slice: planes alternate, so that what lanes read at once
// of both lies in different banks.
__device__ __forceinline__ uint32_t plane_chunk(int plane, int n) {
  return (n >> 1) * 128 + ((n ^ plane) & 1) * 64;
}
// Stores one plane of what the lane has rounded, in the order in which multiply asks for it.
template <int kBits>
__device__ __forceinline__ void store_bytes(uint32_t slice, int plane, const uint32_t* bytes) {
  const int lane = threadIdx.x % 32;
  if constexpr (kBits == 4) {  // of eight columns; 16 eights are 128 columns
    const int eight = lane % 16;
    const uint32_t target = slice + plane * 256 + plane_chunk(plane, lane / 16 * 2 + eight % 4 / 2) +
                            eight / 4 * 16 + eight % 2 * 4;
    store_shared_4(target, bytes[0]);
    store_shared_4(target + 8, bytes[1]);
  } else {
    store_shared_4(slice + plane * 128 + plane_chunk(plane, lane / 16) + lane % 16 * 4, bytes[0]);
  }
}

// The tokens' inputs of a warp's slices. Its pieces are numbered slice after slice, in each token after
// token.
template <typename Element, int kBits, bool kNorm>
struct ByteInputLoader {
  using Slice = ByteSlice<kBits>;
  static constexpr int kColumns = Slice::kLaneColumns;
  static constexpr int kWords = kColumns / 2;
  static constexpr int kAtOnce = 2;
  // What a lane has of a piece, in turn: as it is loaded, and as numbers.
  struct Words {
    uint32_t x[kWords], weights[kWords];
  };
  struct Values {
    float values[kColumns];
    float square;      // their sum of squares, before the norm's weight
    uint32_t largest;  // magnitude, as bits: what is not a number stays
  };
  struct Place {
    int token = 0, round = 0;

    __device__ __forceinline__ void advance(int tokens) {
      if (++token == tokens) token = 0, ++round;
    }
  };
  const ByteStreamParams& p;
  uint32_t inputs;    // the warp's
  ByteFacts* facts;   // the warp's
  float* squares;     // the warp's
  int first, rounds;  // the warp's first slice, and how many it has

  __device__ __forceinline__ int column(int round) const {
    return (first + round * p.plan.span) * Slice::kColumns + static_cast<int>(threadIdx.x % 32) * kColumns;
  }
  // Brings the norm's weights to L2, which no kernel writes.
  __device__ __forceinline__ void prefetch_norm() const {
    for (int round = 0; round < rounds; ++round)
      if (column(round) < static_cast<int>(p.linear.num_inputs))
        asm volatile("prefetch.global.L2 [%0];\n" ::"l"(static_cast<const Element*>(p.linear.norm_weight) +
                                                        column(round)));
  }
  static __device__ __forceinline__ void load(uint32_t (&words)[kWords], const void* row, int column) {
    const auto* source = static_cast<const Element*>(row) + column;
    if constexpr (kWords == 4) {
      const auto piece = *reinterpret_cast<const uint4*>(source);
      words[0] = piece.x, words[1] = piece.y, words[2] = piece.z, words[3] = piece.w;
    } else {
      const auto piece = *reinterpret_cast<const uint2*>(source);
      words[0] = piece.x, words[1] = piece.y;
    }
  }
  __device__ __forceinline__ Words fetch(const Place& at) const {
    const auto num_inputs = static_cast<int>(p.linear.num_inputs);
    const auto* tokens =
        static_cast<const Element*>(p.linear.input) + int64_t{p.pass.first_token} * num_inputs;
    Words words{};
    if (const int from = column(at.round); from < num_inputs) {
      load(words.x, tokens, at.token * num_inputs + from);
      if constexpr (kNorm) load(words.weights, p.linear.norm_weight, from);
    }
    return words;
  }
  // Times the norm's weight where there is one; RMSNorm's factor comes to the sums.
  static __device__ __forceinline__ Values unpack(const Words& words) {
    Values lane{{}, 0, 0};
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      float2 pair = Half<Element>::unpack(words.x[n]);
      if constexpr (kNorm) {
        lane.square = fmaf(pair.y, pair.y, fmaf(pair.x, pair.x, lane.square));
        const float2 factors = Half<Element>::unpack(words.weights[n]);
        pair = make_float2(pair.x * factors.x, pair.y * factors.y);
        const uint32_t larger =
            max(__float_as_uint(pair.x) & 0x7FFFFFFFu, __float_as_uint(pair.y) & 0x7FFFFFFFu);
        lane.largest = max(lane.largest, larger);
      } else {
        lane.largest = __vmaxu2(lane.largest, words.x[n] & 0x7FFF7FFFu);
      }
      lane.values[2 * n] = pair.x;
      lane.values[2 * n + 1] = pair.y;
    }
    if constexpr (!kNorm)
      lane.largest =
          __float_as_uint(Half<Element>::unpack(max(lane.largest & 0xFFFFu, lane.largest >> 16)).x);
    return lane;
  }
  // Rounds piece `i`, whose largest magnitude is known.
  __device__ __forceinline__ void store(int i, const Values& lane, uint32_t largest) const {
    const bool is_first = threadIdx.x % 32 == 0;
    ByteInputs<kColumns> bytes;
    bytes.round(lane.values, __uint_as_float(largest));
    store_bytes<kBits>(inputs + i * Slice::kBytes, 0, bytes.high);
    store_bytes<kBits>(inputs + i * Slice::kBytes, 1, bytes.low);
    const int sum = __reduce_add_sync(0xFFFFFFFFu, bytes.sum);
    int upper = 0;
    if constexpr (kBits == 4) upper = __reduce_add_sync(0xFFFFFFFFu, threadIdx.x % 32 < 16 ? 0 : bytes.sum);
    if (is_first)  // int4's even columns count 16 times
      facts[i] = kBits == 4 ? ByteFacts{bytes.unit * 0.0625f, {16 * (sum - upper), 16 * upper}}
                            : ByteFacts{bytes.unit, {sum, 0}};
  }
  __device__ __forceinline__ void add_square(const Place& at, float square) const {
    square = warp_sum(square);
    if (threadIdx.x % 32 == 0) squares[at.token] = at.round ? squares[at.token] + square : square;
  }
  // Brings them to shared memory, some pieces at once; where too few are left, the last one again.
  __device__ __forceinline__ void run() const {
    const int tokens = p.pass.num_tokens, count = tokens * rounds;
    Place fetched, stored[kAtOnce];
    Words words[kAtOnce];
    const auto fetch_some = [&](int i) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        stored[n] = fetched;
        words[n] = fetch(fetched);
        if (i + n + 1 < count) fetched.advance(tokens);
      }
    };
    fetch_some(0);
#pragma unroll 1
    for (int i = 0; i < count; i += kAtOnce) {
      Values lanes[kAtOnce];
      Place at[kAtOnce];
      uint32_t largest[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) lanes[n] = unpack(words[n]), at[n] = stored[n];
      if (i + kAtOnce < count) fetch_some(i + kAtOnce);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) largest[n] = __reduce_max_sync(0xFFFFFFFFu, lanes[n].largest);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) store(min(i + n, count - 1), lanes[n], largest[n]);
      if constexpr (kNorm)
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
          if (i + n < count) add_square(at[n], lanes[n].square);
    }
    __syncwarp();
  }
};

}  // namespace ortolan::cuda
