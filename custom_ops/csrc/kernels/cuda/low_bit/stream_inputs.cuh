// How stream.cuh shares its work, and the tokens' inputs as it wants them in shared memory.
#pragma once

#include "codes.cuh"
#include "kernels/cuda/linear/gemv.cuh"

namespace ortolan::cuda {

// How a launch shares the work.
struct LowBitPlan {
  static constexpr int kTileRows = 16;
  static constexpr int kRowBytes = 64;  // of codes, in a step
  static constexpr int kCodesBytes = kTileRows * kRowBytes;
  static constexpr int kScalesBytes = kTileRows * 8;
  static constexpr int kStageBytes = kCodesBytes + kScalesBytes + kTileRows * 4;
  static constexpr int kTokens = 8;  // of a tensor-core product

  int tiles;
  int steps;              // of a row
  int row_bytes;          // of codes
  int scale_row_bytes;    // of scales
  int zero_row_bytes;     // of zero points
  int scale_rows_shift;   // rows that share a row of scales, a power of two
  int step_groups;        // groups that a step holds, or 1
  int group_steps_shift;  // steps that share a group, a power of two
  int scale_words;        // of 4 bytes, which hold a step's scales
  int token_stride;       // bytes between tokens' inputs

  // Of a step, in its row.
  __device__ __forceinline__ int first_group(int step) const {
    return (step >> group_steps_shift) * step_groups;
  }
  template <int kTokenTiles>
  static __host__ __device__ constexpr int sums_bytes() {  // of a tile
    return kGemvWarps * kTileRows * kTokens * kTokenTiles * 4;
  }
  template <int kTokenTiles>
  int shared_bytes(int teams, int depth, int tokens) const {
    return teams * (kGemvWarps * depth * kStageBytes + 2 * sums_bytes<kTokenTiles>()) + tokens * token_stride;
  }
};

struct LowBitStreamParams {
  FusedLinearParams linear;
  LowBitWeight weight;
  LowBitPlan plan;
  GemvPass pass;
};

// The order of inputs within 32 columns that Codes::expand asks for: `piece` are eight columns in their
// order.
template <int kBits>
__device__ __forceinline__ void store_inputs(uint32_t row, int piece, const uint4& x) {
  if constexpr (kBits == 4) {
    store_shared_16(row + piece * 16,
                    make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                               __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632)));
  } else {
    const uint32_t target = row + piece / 4 * 64 + piece % 2 * 32 + piece % 4 / 2 * 8;
    const auto store = [](uint32_t address, uint32_t a, uint32_t b) {
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};\n" ::"r"(address), "r"(__byte_perm(a, b, 0x5410)),
                   "r"(__byte_perm(a, b, 0x7632))
                   : "memory");
    };
    store(target, x.x, x.y);
    store(target + 16, x.z, x.w);
  }
}

// The tokens of a team: every kTeams-th, so that a token's share of the threads does not depend on the teams.
template <int kTokens, int kTeams>
struct TeamTokens {
  static constexpr int kMost = kTokens / kTeams, kAtOnce = kMost < 8 ? kMost : 8;
  int tokens;  // of the pass

  __device__ __forceinline__ int token(int n) const {
    return n * kTeams + static_cast<int>(threadIdx.x) / kGemvThreads;
  }
  template <typename Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
    for (int n = 0; n < kMost; ++n)
      if (token(n) < tokens) visit(n);
  }
  // Calls visit(n, i, fetch(token, i)) for pieces i of the tokens, of which several are on their way.
  template <typename Fetch, typename Visit>
  __device__ __forceinline__ void each_piece(int pieces, Fetch fetch, Visit visit) const {
#pragma unroll 1
    for (int i = threadIdx.x % kGemvThreads; i < pieces; i += kGemvThreads)
#pragma unroll
      for (int first = 0; first < kMost; first += kAtOnce) {
        uint4 x[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
          if (token(first + n) < tokens) x[n] = fetch(token(first + n), i);
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
          if (token(first + n) < tokens) visit(first + n, i, x[n]);
      }
  }
};

// Brings the tokens' inputs to shared memory, normalised where the layer says so. For the whole block.
template <typename Element, int kBits, int kTokens, int kTeams>
__device__ __forceinline__ void load_low_bit_inputs(const LowBitStreamParams& p, uint32_t inputs) {
  __shared__ float squares[kTokens][kGemvWarps];
  using Tokens = TeamTokens<kTokens, kTeams>;
  const FusedLinearParams& layer = p.linear;
  const Tokens tokens{p.pass.num_tokens};
  const int pieces = static_cast<int>(layer.num_inputs) / 8, padded = (p.plan.token_stride - 64) / 16;
  const auto* source = static_cast<const uint4*>(layer.input) + int64_t{p.pass.first_token} * pieces;
  const auto* norm = static_cast<const uint4*>(layer.norm_weight);
  const auto fetch = [&](int token, int i) { return i < pieces ? source[token * pieces + i] : uint4{}; };
  float factors[Tokens::kMost] = {};
  if (norm) {
    tokens.each_piece(pieces, fetch, [&](int n, int, const uint4& x) {
      factors[n] = add_products(x, x, factors[n], Element{});
    });
    tokens.each([&](int n) {
      factors[n] = warp_sum(factors[n]);
      if (threadIdx.x % 32 == 0) squares[tokens.token(n)][threadIdx.x / 32 % kGemvWarps] = factors[n];
    });
    __syncthreads();
    tokens.each([&](int n) {
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < kGemvWarps; ++warp) sum += squares[tokens.token(n)][warp];
      factors[n] = rsqrtf(sum / static_cast<float>(layer.num_inputs) + layer.epsilon);
    });
  }
  tokens.each_piece(padded, fetch, [&](int n, int i, const uint4& x) {
    const bool scaled = norm && i < pieces;
    store_inputs<kBits>(inputs + tokens.token(n) * p.plan.token_stride, i,
                        scaled ? scale_piece(x, factors[n], norm[i], Element{}) : x);
  });
  __syncthreads();
}

}  // namespace ortolan::cuda
