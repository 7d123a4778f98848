// The tokens' inputs of a warp's columns, in its registers, as tensor cores want them.
#pragma once

#include <type_traits>

#include "codes.cuh"
#include "held_plan.cuh"

namespace ortolan::cuda {

// Lane 4 g + t holds inputs of tokens g and g + 8, of the columns that meet its codes: of each sixteen bytes
// of codes, four.
template <typename E, LowBitFormat kFormat>
struct HeldInputs {
  using Element = E;
  using Format = Codes<Element, kFormat>;
  static constexpr int kTokenTiles = 2;
  static constexpr int kPieces = HeldPlan::kWarpColumns * Format::kBits / 128;  // of sixteen bytes of codes
  static constexpr int kPieceColumns = 128 / Format::kBits;
  static constexpr int kWords = kPieceColumns / 8;  // of a lane
  static constexpr int kUnitPieces = HeldPlan::kRowBytes / 16, kUnits = kPieces / kUnitPieces;
  const HeldParams& p;
  int first_unit, unit_step;  // the warp's units of a line
  uint32_t x[kTokenTiles][kPieces][kWords];

  // A lane's words of a piece; zeros where there is none.
  static __device__ __forceinline__ void load_words(uint32_t (&words)[kWords], const void* source,
                                                    bool exists) {
    if constexpr (kWords == 4)
      asm volatile(
          "{\n.reg .pred exists;\nsetp.ne.u32 exists, %5, 0;\n"
          "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
          "@exists ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
          : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
          : "l"(source), "r"(static_cast<uint32_t>(exists)));
    else
      asm volatile(
          "{\n.reg .pred exists;\nsetp.ne.u32 exists, %3, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\n"
          "@exists ld.global.v2.u32 {%0, %1}, [%2];\n}\n"
          : "=&r"(words[0]), "=&r"(words[1])
          : "l"(source), "r"(static_cast<uint32_t>(exists)));
  }
  // Of `row` [K].
  __device__ __forceinline__ void load_row(uint32_t (&words)[kPieces][kWords], const Element* row,
                                           bool exists) const {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int column = (first_unit + unit * unit_step) * kUnitPieces * kPieceColumns;
      const int left = exists ? static_cast<int>(p.linear.num_inputs) - column : 0;
      const Element* source = row + column + threadIdx.x % 4 * (2 * kWords);
#pragma unroll
      for (int n = 0; n < kUnitPieces; ++n)
        load_words(words[unit * kUnitPieces + n], source + n * kPieceColumns, n * kPieceColumns < left);
    }
  }
  __device__ __forceinline__ void load() {
    const int64_t size = p.linear.num_inputs;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const int token = static_cast<int>(threadIdx.x) % 32 / 4 + 8 * tile;
      load_row(x[tile], static_cast<const Element*>(p.linear.input) + (p.pass.first_token + token) * size,
               token < p.pass.num_tokens);
    }
  }
  // The sum of squares of token g of each eight, in lane 4 g + g / 2.
  __device__ __forceinline__ float sum_of_squares(int tile) const {
    float squares[4] = {};
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
      for (int n = 0; n < kWords; n += 2) {
        const uint32_t lines[] = {x[tile][piece][n], 0, x[tile][piece][n + 1], 0};
        Half<Element>::multiply_add(squares, lines, x[tile][piece][n], x[tile][piece][n + 1]);
      }
    return threadIdx.x / 4 % 2 ? squares[1] : squares[0];
  }
  // To `place`, in all blocks of the cluster: the warp's [tokens]. A lone block counts warps, one of a
  // cluster bytes.
  __device__ __forceinline__ void share_squares(float* place, Barrier& squared) const {
    const int lane = threadIdx.x % 32, g = lane / 4, cluster = p.plan.cluster;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const float sum = sum_of_squares(tile);
      float* target = place + g + 8 * tile;
      if (lane % 4 != g / 2) continue;
      if (cluster == 1) *target = sum;
      for (int block = 0; cluster > 1 && block < cluster; ++block)
        send_to(shared_address(target), block, sum, squared);
    }
    if (cluster == 1) squared.arrive_once(lane);
  }
  // The sum of a token's squares [warps, tokens]: the share of one of some lanes.
  static __device__ __forceinline__ float squares_of(const HeldParams& p, const float* squares, int token,
                                                     int lane, int lanes) {
    float sum = 0;
#pragma unroll 4
    for (int warp = lane; warp < p.plan.cluster * p.plan.span; warp += lanes)
      sum += squares[warp * HeldPlan::kTokens + token];
    return sum;
  }
  using NormWeights = uint32_t[kPieces][kWords];
  // No kernel writes them.
  __device__ __forceinline__ void load_norm(NormWeights& weights) const {
    load_row(weights, static_cast<const Element*>(p.linear.norm_weight), p.linear.norm_weight != nullptr);
  }
  // bfloat16 has room for what is not normalised yet: the norm's factor comes to the sums.
  static constexpr bool kFactorLater = std::is_same_v<Element, __nv_bfloat16>;
  __device__ __forceinline__ void weigh(const NormWeights& norm) {
#pragma unroll
    for (int n = 0; n < kPieces * kWords; ++n)
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        uint32_t& pair = x[tile][n / kWords][n % kWords];
        pair = multiply_pairs<Element>(pair, norm[n / kWords][n % kWords]);
      }
  }
  __device__ __forceinline__ void normalise(const NormWeights& norm, const float* squares) {
    const int lane = threadIdx.x % 32;
    float factors[kTokenTiles];
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      float sum = squares_of(p, squares, lane / 4 + 8 * tile, lane % 4, 4);
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      factors[tile] = rsqrtf(sum * p.plan.input_share + p.linear.epsilon);
    }
#pragma unroll
    for (int n = 0; n < kPieces * kWords; ++n) {
      const float2 weights = Half<Element>::unpack(norm[n / kWords][n % kWords]);
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        uint32_t& pair = x[tile][n / kWords][n % kWords];
        const float2 values = Half<Element>::unpack(pair);
        pair =
            Half<Element>::pack(values.x * factors[tile] * weights.x, values.y * factors[tile] * weights.y);
      }
    }
  }
  // To the order that Codes::expand asks for.
  __device__ __forceinline__ void arrange() {
#pragma unroll
    for (int n = 0; n < kTokenTiles * kPieces; ++n) {
      uint32_t (&words)[kWords] = x[n / kPieces][n % kPieces];
      const auto low = [](uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); };
      const auto high = [](uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); };
      const uint32_t a = words[0], b = words[1];
      if constexpr (kWords == 4) {
        const uint32_t c = words[2], d = words[3];
        words[0] = low(a, c), words[1] = high(a, c);
        words[2] = low(b, d), words[3] = high(b, d);
      } else {
        words[0] = low(a, b), words[1] = high(a, b);
      }
    }
  }
  // Adds the products of a piece and the codes of two lines.
  __device__ __forceinline__ void multiply(float (&sums)[kTokenTiles][4],
                                           const uint32_t (&upper)[Format::kPairs],
                                           const uint32_t (&lower)[Format::kPairs], int piece) const {
#pragma unroll
    for (int n = 0; n < Format::kPairs; n += 2) {
      const uint32_t lines[] = {upper[n], lower[n], upper[n + 1], lower[n + 1]};
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile)
        Half<Element>::multiply_add(sums[tile], lines, x[tile][piece][n], x[tile][piece][n + 1]);
    }
  }
};

}  // namespace ortolan::cuda
