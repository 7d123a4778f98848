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

  // For the whole warp, whose 256 columns share the power. The largest number is at most 32639, which two
  // signed bytes hold. kInOrder: columns 0 to 3 and 4 to 7; else the even ones and the odd ones.
  template <typename Element, bool kInOrder>
  __device__ __forceinline__ void round(const uint4& x) {
    constexpr uint32_t kAbsolute = 0x7FFF7FFFu;
    const uint32_t words[] = {x.x, x.y, x.z, x.w};
    // Compared as bits: what is not a number stays.
    uint32_t largest =
        __vmaxu2(__vmaxu2(x.x & kAbsolute, x.y & kAbsolute), __vmaxu2(x.z & kAbsolute, x.w & kAbsolute));
    largest = __reduce_max_sync(0xFFFFFFFFu, max(largest & 0xFFFFu, largest >> 16));
    const float magnitude = Half<Element>::unpack(largest).x * (32768.5f / 32640.0f);
    const uint32_t exponent = max(__float_as_uint(magnitude) >> 23, 19u);
    const float factor = __uint_as_float((268u - exponent) << 23);
    unit = __uint_as_float(exponent == 255 ? 0x7FFFFFFFu : (exponent - 14) << 23);
    // 1.5 * 2^23, whose last bits are units, and 128: bits 8 to 15 are the high byte.
    constexpr uint32_t kBase = 0x4B400080u;
    uint32_t numbers[8];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 pair = Half<Element>::unpack(words[n]);
      numbers[2 * n] = __float_as_uint(fmaf(pair.x, factor, __uint_as_float(kBase)));
      numbers[2 * n + 1] = __float_as_uint(fmaf(pair.y, factor, __uint_as_float(kBase)));
    }
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

// The factors of RMSNorm, one per token, in shared memory. A token's sum has one order. For the whole block.
template <typename Element>
__device__ __forceinline__ void find_norm_factors(const ByteStreamParams& p, const uint4* source, int pieces,
                                                  float* factors) {
  __shared__ float squares[16][BytePlan::kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
  for (int token = 0; token < p.pass.num_tokens; ++token) {
    float sum = 0;
    for (int i = threadIdx.x; i < pieces; i += BytePlan::kThreads) {
      const uint4 x = source[token * pieces + i];
      sum = add_products(x, x, sum, Element{});
    }
    sum = warp_sum(sum);
    if (lane == 0) squares[token][warp] = sum;
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < p.pass.num_tokens) {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < BytePlan::kWarps; ++n) sum += squares[threadIdx.x][n];
    factors[threadIdx.x] = rsqrtf(sum / static_cast<float>(p.linear.num_inputs) + p.linear.epsilon);
  }
  __syncthreads();
}

// Brings the tokens' inputs to shared memory, normalised and rounded to the element type where the layer says
// so, then as bytes; and what each 128 columns' numbers are worth, and their sum, [block, token]. For the
// whole block.
template <typename Element, LowBitFormat kFormat>
__device__ __forceinline__ void load_byte_inputs(const ByteStreamParams& p, uint32_t inputs, float2* facts) {
  __shared__ float factors[16];
  constexpr int kBits = static_cast<int>(code_bits(kFormat));
  constexpr int kAtOnce = 4;
  const FusedLinearParams& layer = p.linear;
  const int pieces = static_cast<int>(layer.num_inputs) / 8, padded = p.plan.blocks * 16;
  const int tokens = p.pass.num_tokens;
  const auto* source = static_cast<const uint4*>(layer.input) + int64_t{p.pass.first_token} * pieces;
  const auto* norm = static_cast<const uint4*>(layer.norm_weight);
  if (norm) find_norm_factors<Element>(p, source, pieces, factors);
#pragma unroll 1
  for (int i = threadIdx.x; i < padded; i += BytePlan::kThreads) {
    const uint4 weight = norm && i < pieces ? norm[i] : uint4{};
#pragma unroll 1
    for (int first = 0; first < tokens; first += kAtOnce) {
      uint4 x[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
        x[n] = i < pieces && first + n < tokens ? source[(first + n) * pieces + i] : uint4{};
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int token = first + n;
        if (token >= tokens) break;
        ByteInputs bytes;
        bytes.round<Element, kBits == 8>(norm ? scale_piece(x[n], factors[token], weight, Element{}) : x[n]);
        const uint32_t plane = inputs + 2 * token * p.plan.plane_stride + i / 16 * BytePlan::kBlockColumns;
        store_bytes<kBits>(plane, i % 16, bytes.high);
        store_bytes<kBits>(plane + p.plan.plane_stride, i % 16, bytes.low);
        const int both = __reduce_add_sync(0xFFFFFFFFu, bytes.sum);
        const int first_sum = __reduce_add_sync(0xFFFFFFFFu, threadIdx.x % 32 < 16 ? bytes.sum : 0);
        const int sum = threadIdx.x % 32 < 16 ? first_sum : both - first_sum;
        if (i % 16 == 0)  // int4's even columns count 16 times
          facts[i / 16 * tokens + token] = make_float2(bytes.unit * (kBits == 4 ? 0.0625f : 1.0f),
                                                       __int_as_float(kBits == 4 ? 16 * sum : sum));
      }
    }
  }
  __syncthreads();
}

}  // namespace ortolan::cuda
