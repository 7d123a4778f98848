// How bytes.cuh shares its work, and the tokens' inputs as pairs of bytes in shared memory.
#pragma once

#include "kernels/cuda/linear/gemv.cuh"
#include "kernels/low_bit_params.h"

namespace ortolan::cuda {

// How a launch shares the work: units of 16 lines of weights by 128 bytes of codes.
struct BytePlan {
  static constexpr int kLines = 16;
  static constexpr int kRowBytes = 128;  // of codes, in a unit
  static constexpr int kCodesBytes = kLines * kRowBytes;
  static constexpr int kStageBytes = kCodesBytes + 2 * kLines * 4;  // with words of scales and zero points
  static constexpr int kBlockColumns = 128;                         // whose numbers are added up
  static constexpr int kWarps = 12;
  static constexpr int kThreads = 32 * kWarps;

  int tiles;           // of 16 lines
  int slices;          // units of a tile
  int turn_tiles;      // of a block, whose parts wait in shared memory for the end of their turn
  int slice_step;      // from a warp's unit to its next one, kWarps units later
  int steps[2];        // of outputs on that way, where it ends before the tile's last slice, and behind it
  int64_t leaps[2];    // of bytes, likewise
  int64_t line_bytes;  // from a tile's first 8 lines to its others
  int later_lines;     // rows between them: 8, or 0 between gates and factors
  int row_bytes;       // of codes
  int groups;          // of a row
  int zero_row_bytes;
  int group_shift;   // slices that share a group, a power of two
  bool paired;       // a slice has two groups
  int blocks;        // of 128 columns, in a row of inputs
  int plane_stride;  // bytes between a token's high bytes and its low ones, and between tokens'

  __host__ __device__ int parts(int tokens) const { return turn_tiles * slices * tokens * kLines; }
  __host__ __device__ int facts_offset(int ring_bytes, int tokens) const {
    return ring_bytes + 2 * tokens * plane_stride;
  }
  __host__ __device__ int parts_offset(int ring_bytes, int tokens) const {
    return facts_offset(ring_bytes, tokens) + tokens * blocks * 8;
  }
  __host__ __device__ int shared_bytes(int ring_bytes, int tokens) const {  // parts of two turns
    return parts_offset(ring_bytes, tokens) + 2 * 4 * parts(tokens);
  }
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

// Eight inputs as 16-bit numbers of a power of two. A number is 256 * high + low, bytes with a sign.
struct ByteInputs {
  uint32_t high[2], low[2];
  float unit;  // the power of two
  int sum;     // of the lane's numbers

  // `largest`: magnitude among the columns that share the power. The largest number is at most 32639, which
  // two signed bytes hold. kInOrder: columns 0 to 3 and 4 to 7; else the even ones and the odd ones.
  template <bool kInOrder>
  __device__ __forceinline__ void round(const float (&values)[8], float largest) {
    const uint32_t exponent = max(__float_as_uint(largest * (32768.5f / 32639.0f)) >> 23, 19u);
    const float factor = __uint_as_float((268u - exponent) << 23);
    unit = __uint_as_float(exponent == 255 ? 0x7FFFFFFFu : (exponent - 14) << 23);
    // 1.5 * 2^23, whose last bits are units, and 128: bits 8 to 15 are the high byte.
    constexpr uint32_t kBase = 0x4B400080u;
    uint32_t numbers[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) numbers[n] = __float_as_uint(fmaf(values[n], factor, __uint_as_float(kBase)));
    sum = static_cast<int>(0u - 8 * kBase);
#pragma unroll
    for (int n = 0; n < 8; n += 2) sum += static_cast<int>(numbers[n] + numbers[n + 1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto number = [&](int n) { return numbers[kInOrder ? 4 * half + n : 2 * n + half]; };
      const uint32_t first = __byte_perm(number(0), number(1), 0x5410);
      const uint32_t second = __byte_perm(number(2), number(3), 0x5410);
      high[half] = __byte_perm(first, second, 0x7531);
      low[half] = __byte_perm(first, second, 0x6420) ^ 0x80808080u;
    }
  }
};

__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(address), "r"(word) : "memory");
}
// Stores one plane of what a thread has rounded, `piece` of 16 within 128 columns, in the order in which
// multiply asks for it: int4's words are the even and the odd columns of eight, of two eights.
template <int kBits>
__device__ __forceinline__ void store_bytes(uint32_t block, int piece, const uint32_t (&bytes)[2]) {
  if constexpr (kBits == 4) {
    const uint32_t target = block + piece % 4 / 2 * 64 + piece / 4 * 16 + piece % 2 * 4;
    store_shared_4(target, bytes[0]);
    store_shared_4(target + 8, bytes[1]);
  } else {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};\n" ::"r"(block + piece * 8), "r"(bytes[0]), "r"(bytes[1])
                 : "memory");
  }
}

// What lies in shared memory behind the rings.
struct ByteShared {
  uint32_t inputs;  // planes of bytes [token, high or low, column]
  float2* facts;    // [block, token]: what 128 columns' numbers are worth, and their sum
  float* squares;   // [token, chunk]: of the inputs, where the layer has a norm
  float* factors;   // [token]: RMSNorm's
};

// 256 columns of a token, for a warp; eight columns for each of its lanes.
struct ByteChunk {
  int token, chunk;

  __device__ __forceinline__ void wrap(int chunks) {
    while (chunk >= chunks) {
      chunk -= chunks;
      ++token;
    }
  }
  __device__ __forceinline__ void advance(int chunks) {
    chunk += BytePlan::kWarps;
    wrap(chunks);
  }
  __device__ __forceinline__ int piece() const { return chunk * 32 + static_cast<int>(threadIdx.x % 32); }
};

// Rounds a chunk, times the norm's weight where there is one; RMSNorm's factor comes to the sums. A token's
// sum of squares has one order: within a chunk, then chunk after chunk.
template <typename Element, int kBits, bool kNorm>
__device__ __forceinline__ void store_chunk(const ByteStreamParams& p, const ByteShared& shared,
                                            const ByteChunk& at, const uint4& x, const uint4& weight) {
  const int lane = threadIdx.x % 32, tokens = p.pass.num_tokens;
  const uint32_t words[] = {x.x, x.y, x.z, x.w}, weights[] = {weight.x, weight.y, weight.z, weight.w};
  float values[8];
  float square = 0;
  uint32_t largest = 0;  // as bits: what is not a number stays
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    float2 pair = Half<Element>::unpack(words[n]);
    if constexpr (kNorm) {
      square = fmaf(pair.y, pair.y, fmaf(pair.x, pair.x, square));
      const float2 factors = Half<Element>::unpack(weights[n]);
      pair = make_float2(pair.x * factors.x, pair.y * factors.y);
      largest =
          max(largest, max(__float_as_uint(pair.x) & 0x7FFFFFFFu, __float_as_uint(pair.y) & 0x7FFFFFFFu));
    } else {
      largest = __vmaxu2(largest, words[n] & 0x7FFF7FFFu);
    }
    values[2 * n] = pair.x;
    values[2 * n + 1] = pair.y;
  }
  if constexpr (!kNorm)
    largest = __float_as_uint(Half<Element>::unpack(max(largest & 0xFFFFu, largest >> 16)).x);
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  ByteInputs bytes;
  bytes.round<kBits == 8>(values, __uint_as_float(largest));
  const int i = at.piece();
  const uint32_t plane =
      shared.inputs + 2 * at.token * p.plan.plane_stride + i / 16 * BytePlan::kBlockColumns;
  store_bytes<kBits>(plane, i % 16, bytes.high);
  store_bytes<kBits>(plane + p.plan.plane_stride, i % 16, bytes.low);
  const int both = __reduce_add_sync(0xFFFFFFFFu, bytes.sum);
  const int first = __reduce_add_sync(0xFFFFFFFFu, lane < 16 ? bytes.sum : 0);
  if (lane % 16 == 0) {  // int4's even columns count 16 times
    const int sum = lane < 16 ? first : both - first;
    shared.facts[i / 16 * tokens + at.token] =
        make_float2(bytes.unit * (kBits == 4 ? 0.0625f : 1.0f), __int_as_float(kBits == 4 ? 16 * sum : sum));
  }
  if constexpr (kNorm) {
    square = warp_sum(square);
    if (lane == 0) shared.squares[at.token * (p.plan.blocks / 2) + at.chunk] = square;
  }
}

// Brings the tokens' inputs to shared memory, several chunks of a warp at once. For the whole block.
template <typename Element, int kBits, bool kNorm>
__device__ __forceinline__ void load_byte_inputs(const ByteStreamParams& p, const ByteShared& shared) {
  constexpr int kAtOnce = 4;
  const int pieces = static_cast<int>(p.linear.num_inputs) / 8, chunks = p.plan.blocks / 2;
  const int tokens = p.pass.num_tokens;
  const auto* source = static_cast<const uint4*>(p.linear.input) + int64_t{p.pass.first_token} * pieces;
  const auto* norm = static_cast<const uint4*>(p.linear.norm_weight);
  ByteChunk fetched{0, static_cast<int>(threadIdx.x) / 32};
  fetched.wrap(chunks);
  ByteChunk stored = fetched;
#pragma unroll 1
  while (stored.token < tokens) {
    uint4 x[kAtOnce], weights[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int piece = fetched.piece();
      const bool exists = fetched.token < tokens && piece < pieces;
      x[n] = exists ? source[fetched.token * pieces + piece] : uint4{};
      weights[n] = kNorm && exists ? norm[piece] : uint4{};
      fetched.advance(chunks);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (stored.token >= tokens) break;
      store_chunk<Element, kBits, kNorm>(p, shared, stored, x[n], weights[n]);
      stored.advance(chunks);
    }
  }
  __syncthreads();
  if (!kNorm || static_cast<int>(threadIdx.x) >= tokens) return;
  float sum = 0;
#pragma unroll 8
  for (int n = 0; n < chunks; ++n) sum += shared.squares[threadIdx.x * chunks + n];
  shared.factors[threadIdx.x] = rsqrtf(sum / static_cast<float>(p.linear.num_inputs) + p.linear.epsilon);
}

}  // namespace ortolan::cuda
