// Products of up to 4 pairs with codes of 4 bits on integer tensor cores, for bytes.cuh. Tensor cores
// multiply 16 lines of codes by 8 columns, the two bytes of four pairs, exactly; a group's sum is scaled in
// float32.
//
// int4: a code becomes a byte by a mask. mxfp4: twice a value is an integer up to 12. A byte permutation
// looks up four at once, and gives zero where a code's sign is set: one of the codes, and one of the codes
// with other signs, whose products are subtracted.
#pragma once

#include "byte_inputs.cuh"
#include "kernels/cuda/low_bit/byte_mma.cuh"
#include "kernels/cuda/low_bit/codes.cuh"

namespace ortolan::cuda {

// What a kernel is compiled for.
template <typename E, LowBitFormat kF, bool kZ, bool kS>
struct ByteKind {
  using Element = E;
  static constexpr bool kFloats = kF == LowBitFormat::kMxfp4;
  static constexpr bool kZeros = kZ;  // zero points are given
  static constexpr bool kShort = kS;  // groups of less than 128 columns
  static_assert(kFloats || !(kZeros && kShort));
  // Of a line and a slice, at most.
  static constexpr int kScaleWords = kFloats ? 3 : kShort ? 5 : 2;
  static constexpr int kZeroWords = kZeros ? 1 : 0;
};

// Lane 4 g + t has the sums of lines g and g + 8 for pair t.
template <typename Kind>
struct ByteExpertProducts {
  static constexpr int kPieces = 8;  // of 16 bytes of codes, in a slice
  static constexpr int kWordBytes = ByteExpertPlan::kLines * 4;
  const ByteExpertPlan& plan;
  int pairs = 0;
  uint32_t inputs = 0;  // the lane's, of its pair; of another one where there is none
  const SliceFacts* facts = nullptr;
  uint32_t codes;                            // where the lane's row of codes lies in a stage
  uint32_t table[2];                         // twice the values of e2m1
  uint32_t scale_places[2], zero_places[2];  // the low bits of the lines' addresses
  float sums[2];

  __device__ __forceinline__ explicit ByteExpertProducts(const ByteExpertPlan& plan) : plan(plan) {
    const int lane = threadIdx.x % 32, row = lane % 8;  // of its 8x8 tile
    codes = lane / 8 % 2 * 1024 + row * 128 + (lane / 16 ^ row) * 16;
    // From a lane, since a constant would be moved to a register for each look-up.
    table[0] = __shfl_sync(0xFFFFFFFFu, 0x03020100u, 0);
    table[1] = __shfl_sync(0xFFFFFFFFu, 0x0C080604u, 0);
  }
  // For inputs that lie [round, pair].
  __device__ __forceinline__ void prepare(uint32_t bytes, const SliceFacts* first_facts, int num_pairs) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    pairs = num_pairs;
    inputs = bytes + min(g / 2, pairs - 1) * SliceBytes::kBytes + g % 2 * SliceBytes::kPlane + t * 16;
    facts = first_facts + min(t, pairs - 1);
  }
  // `later_row`: from a tile's first line to its eighth.
  __device__ __forceinline__ void start(int first_row, int later_row) {
    const int row = first_row + static_cast<int>(threadIdx.x % 32 / 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[half] = 0;
      scale_places[half] = (row + half * later_row) * plan.scale_row_bytes;
      zero_places[half] = (row + half * later_row) * plan.zero_row_bytes;
    }
  }

  // What a slice's multiplication needs from shared memory: all of it is loaded first.
  struct Slice {
    uint32_t codes[kPieces][2];  // of both lines
    uint2 inputs[kPieces];
    uint32_t scales[2][Kind::kScaleWords], zeros[2];

    // Words from a byte on, `place` the low bits of its address.
    template <int kWords>
    static __device__ __forceinline__ void load_words(uint32_t (&words)[kWords], uint32_t line,
                                                      uint32_t place) {
#pragma unroll
      for (int n = 0; n < kWords; ++n) words[n] = load_shared_word(line + n * kWordBytes);
#pragma unroll
      for (int n = 0; n < kWords; ++n)
        words[n] = __funnelshift_r(words[n], n + 1 < kWords ? words[n + 1] : 0, (place & 3) * 8);
    }
  };
  __device__ __forceinline__ Slice load(uint32_t stage, int place, int group) const {
    Slice slice;
#pragma unroll
    for (int n = 0; n < kPieces / 2; ++n) {
      uint32_t matrices[4];
      load_matrix_x4(matrices, stage + (codes ^ n * 32));
      const uint4 x = load_shared_16(inputs + place * SliceBytes::kBytes + n * SliceBytes::kStep);
#pragma unroll
      for (int i = 0; i < 4; ++i) slice.codes[2 * n + i / 2][i % 2] = matrices[i];
      slice.inputs[2 * n] = make_uint2(x.x, x.y);
      slice.inputs[2 * n + 1] = make_uint2(x.z, x.w);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t line = stage + ByteExpertPlan::kCodesBytes + (threadIdx.x % 32 / 4 + 8 * half) * 4;
      Slice::load_words(slice.scales[half], line,
                        scale_places[half] + group * static_cast<uint32_t>(Kind::kFloats ? 1 : 2));
      slice.zeros[half] = 0x88888888u;
      if constexpr (Kind::kZeros) {
        uint32_t words[Kind::kZeroWords];
        Slice::load_words(words, line + Kind::kScaleWords * kWordBytes, zero_places[half] + group / 2);
        slice.zeros[half] = words[0] >> group % 2 * 4;
      }
    }
    return slice;
  }

  // Twice the values of four codes that have no sign, and 0 for those that have one: prmt repeats the upper
  // bit of what a selector with bit 3 selects.
  __device__ __forceinline__ uint32_t positive_values(uint32_t four_codes) const {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(bytes) : "r"(table[0]), "r"(table[1]), "r"(four_codes));
    return bytes;
  }
  __device__ __forceinline__ void expand_floats(uint32_t first, uint32_t second, uint32_t (&bytes)[4]) const {
    bytes[0] = positive_values(first), bytes[2] = positive_values(first >> 16);
    bytes[1] = positive_values(second), bytes[3] = positive_values(second >> 16);
  }
  // The exponents of a slice as powers of two.
  static __device__ __forceinline__ void exponent_values(const uint32_t (&words)[Kind::kScaleWords],
                                                         float (&values)[kPieces]) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const uint32_t word = words[n / 4];
      values[n] = __uint_as_float((n % 4 < 3 ? word << (23 - n % 4 * 8) : word >> 1) & 0x7F800000u);
    }
    const auto has_zero = [](uint32_t word) { return (word - 0x01010101u) & ~word & 0x80808080u; };
    if ((has_zero(words[0]) | has_zero(words[1])) == 0) return;  // whose value is no normal number
#pragma unroll
    for (int n = 0; n < kPieces; ++n) values[n] = e8m0_value(words[n / 4] >> n % 4 * 8 & 0xFF);
  }
  __device__ __forceinline__ void multiply_floats(const Slice& slice, float unit) {
    float values[2][kPieces], parts[2] = {};
    exponent_values(slice.scales[0], values[0]);
    exponent_values(slice.scales[1], values[1]);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint32_t upper = slice.codes[piece][0], lower = slice.codes[piece][1];
      uint32_t bytes[4];
      float added[4], subtracted[4];
      expand_floats(upper, lower, bytes);
      multiply_bytes(added, bytes, slice.inputs[piece].x, slice.inputs[piece].y);
      expand_floats(upper ^ 0x88888888u, lower ^ 0x88888888u, bytes);
      multiply_bytes(subtracted, bytes, slice.inputs[piece].x, slice.inputs[piece].y);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float high = added[2 * half] - subtracted[2 * half];
        const float low = added[2 * half + 1] - subtracted[2 * half + 1];
        parts[half] = fmaf(fmaf(high, 256.0f, low), values[half][piece], parts[half]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) sums[half] = fmaf(parts[half], 0.5f * unit, sums[half]);
  }

  // The scale of the group, in the slice, that a piece belongs to.
  __device__ __forceinline__ float scale_of(const uint32_t (&words)[Kind::kScaleWords], int piece) const {
    uint32_t word = words[0];
    if constexpr (Kind::kShort) word = plan.piece_shift == 0 ? words[piece / 2] : words[piece / 4];
    return Half<typename Kind::Element>::unpack(word >> (piece >> plan.piece_shift) % 2 * 16).x;
  }
  // Sums of int4 wait for the last piece of 128 columns where these share a scale.
  __device__ __forceinline__ void multiply_integers(const Slice& slice, const SliceFacts& fact) {
    constexpr int kAtOnce = Kind::kShort ? 1 : 4;
#pragma unroll
    for (int first = 0; first < kPieces; first += kAtOnce) {
      int parts[4] = {}, sum = 0;
#pragma unroll
      for (int piece = first; piece < first + kAtOnce; ++piece) {
        const uint32_t upper = slice.codes[piece][0], lower = slice.codes[piece][1];
        const uint32_t bytes[] = {upper & 0x0F0F0F0Fu, lower & 0x0F0F0F0Fu, upper >> 4 & 0x0F0F0F0Fu,
                                  lower >> 4 & 0x0F0F0F0Fu};
        multiply_bytes(parts, bytes, slice.inputs[piece].x, slice.inputs[piece].y);
        sum += fact.sums[piece];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto zero = static_cast<int>(slice.zeros[half] >> 4 * (first >> plan.piece_shift) & 15);
        const int number = parts[2 * half] * 256 + parts[2 * half + 1] - zero * sum;
        sums[half] =
            fmaf(static_cast<float>(number), scale_of(slice.scales[half], first) * fact.unit, sums[half]);
      }
    }
  }
  // `round`: which of the warp's slices of a tile it is.
  __device__ __forceinline__ void multiply(uint32_t stage, int slice, int round) {
    const int place = round * pairs;
    const Slice loaded = load(stage, place, plan.first_group(slice));
    if constexpr (Kind::kFloats)
      multiply_floats(loaded, facts[place].unit);
    else
      multiply_integers(loaded, facts[place]);
  }
  // To `target` [pairs, lines].
  __device__ __forceinline__ void store(float* target) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if (t >= pairs) return;
    target[t * ByteExpertPlan::kLines + g] = sums[0];
    target[t * ByteExpertPlan::kLines + g + 8] = sums[1];
  }
};

}  // namespace ortolan::cuda
