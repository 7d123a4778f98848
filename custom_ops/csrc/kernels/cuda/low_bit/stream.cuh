// Products of up to 16 tokens of 16-bit elements with low-bit weights, which stream through shared memory
// once, as they lie in memory.
//
// A tile is 16 rows of weights, in a gated layer the gates and factors of 8 outputs. Blocks take tiles in
// turn; a block's warps share the steps of its rows, 64 bytes of codes each, with the scales and zero points
// of these columns. Each lane copies 16 bytes of two rows into a ring of the warp's own, before the kernel in
// front has ended (no kernel writes weights). Codes become pairs of elements in registers, in the order in
// which a word holds them: the inputs lie in shared memory in the order that this asks for. Tensor cores
// multiply 16 rows of weights by 8 tokens; a group's sums are scaled in float32. A token's sums have one
// order: within a group, the groups of a warp, then warp after warp. It depends on the layer alone.
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
  int steps;         // of a row
  int group_pieces;  // of 16 bytes of codes, that share a scale: 1, 2 or 4 of a step
  int step_groups;   // groups that a step moves on by, or 0: group_steps steps share one
  int group_steps;
  int scale_bytes;   // of one scale
  int scale_words;   // of 4 bytes, which hold a step's scales
  int token_stride;  // bytes between tokens' inputs
  int turn_tiles;    // tiles whose sums wait for each other

  template <int kTokenTiles>
  static constexpr int sums_bytes() {  // of a tile
    return kGemvWarps * kTileRows * kTokens * kTokenTiles * 4;
  }
  template <int kTokenTiles>
  int shared_bytes(int depth, int tokens) const {
    return kGemvWarps * depth * kStageBytes + 2 * turn_tiles * sums_bytes<kTokenTiles>() +
           tokens * token_stride;
  }
};

struct LowBitStreamParams {
  FusedLinearParams linear;
  LowBitWeight weight;
  LowBitPlan plan;
  GemvPass pass;
};

// The same, where memory is read in pieces of 128 bytes.
__device__ __forceinline__ void copy_codes(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_word(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// The warp's steps, tile after tile, as it fetches or multiplies them.
struct LowBitCursor {
  int tile, step, first, end;

  __device__ __forceinline__ bool done(const LowBitPlan& plan) const { return tile >= plan.tiles; }
  // Whether the tile has changed.
  __device__ __forceinline__ bool advance() {
    if (++step < end) return false;
    step = first;
    tile += static_cast<int>(gridDim.x);
    return true;
  }
};

// Where a row's scales and zero points begin, in bytes.
struct LowBitRow {
  int64_t row, scales, zeros;

  template <LowBitFormat kFormat>
  static __device__ __forceinline__ LowBitRow of(const LowBitStreamParams& p, int tile, int line) {
    const int64_t outputs = p.linear.num_outputs;
    const bool gated = p.linear.activation != GatedActivation::kNone;
    const int64_t row = gated ? min(int64_t{tile} * 8 + line % 8, outputs - 1) + (line >= 8 ? outputs : 0)
                              : min(int64_t{tile} * 16 + line, outputs - 1);
    const int64_t groups = p.weight.groups();
    const int64_t scale_row = kFormat == LowBitFormat::kFp8 ? row / p.weight.scale_rows : row;
    return {row, scale_row * groups * p.plan.scale_bytes,
            row * (kFormat == LowBitFormat::kInt4 ? (groups + 1) / 2 : groups)};
  }
};

__device__ __forceinline__ int first_group(const LowBitPlan& plan, int step) {
  return plan.step_groups ? step * plan.step_groups : step / plan.group_steps;
}

// Fetches a warp's steps into its ring.
template <LowBitFormat kFormat>
struct LowBitFetcher {
  const LowBitStreamParams& p;
  uint32_t ring;
  LowBitCursor at;
  const uint8_t* codes[2];
  LowBitRow words;  // of the line whose scales this lane copies

  __device__ __forceinline__ void aim() {
    const int lane = threadIdx.x % 32;
    const int64_t row_bytes = p.weight.columns * code_bits(kFormat) / 8;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      codes[half] = p.weight.codes + LowBitRow::of<kFormat>(p, at.tile, lane / 4 + 8 * half).row * row_bytes;
    words = LowBitRow::of<kFormat>(p, at.tile, lane % 16);
  }
  static __device__ __forceinline__ const uint8_t* word_of(const void* array, int64_t byte) {
    return static_cast<const uint8_t*>(array) + (byte & ~int64_t{3});
  }
  __device__ __forceinline__ void fetch(int place) {
    if (!at.done(p.plan)) {
      const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
      const uint32_t stage = ring + place * LowBitPlan::kStageBytes;
      const int byte = at.step * LowBitPlan::kRowBytes + t * 16;
      const bool valid = byte < static_cast<int>(p.weight.columns * code_bits(kFormat) / 8);
      const uint32_t target = stage + (g * 4 + (t ^ (g >> 1 & 3))) * 16;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        copy_codes(target + half * 512, codes[half] + (valid ? byte : 0), valid);
      const int group = first_group(p.plan, at.step), word = lane / 16;
      const void* scales = kFormat == LowBitFormat::kFp8 ? p.weight.float_scales
                           : Codes<__half, kFormat>::kInteger
                               ? p.weight.scales
                               : static_cast<const void*>(p.weight.scale_codes);
      if (word < p.plan.scale_words) {
        const int64_t first = words.scales + int64_t{group} * p.plan.scale_bytes;
        const bool within =
            word == 0 || group * p.plan.scale_bytes + 4 < p.weight.groups() * p.plan.scale_bytes;
        copy_word(stage + LowBitPlan::kCodesBytes + lane % 16 * 8 + word * 4,
                  word_of(scales, first) + (within ? word * 4 : 0), within);
      }
      if (Codes<__half, kFormat>::kInteger && p.weight.zero_points && lane < 16)
        copy_word(
            stage + LowBitPlan::kCodesBytes + LowBitPlan::kScalesBytes + lane * 4,
            word_of(p.weight.zero_points, words.zeros + (kFormat == LowBitFormat::kInt4 ? group / 2 : group)),
            true);
      if (at.advance() && !at.done(p.plan)) aim();
    }
    copy_async_commit();
  }
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

// Brings the tokens' inputs to shared memory, normalised where the layer says so. For the whole block.
template <typename Element, int kBits, int kTokens>
__device__ __forceinline__ void load_low_bit_inputs(const LowBitStreamParams& p, uint32_t inputs) {
  __shared__ float squares[kTokens][kGemvWarps];
  const FusedLinearParams& layer = p.linear;
  const int pieces = static_cast<int>(layer.num_inputs) / 8, tokens = p.pass.num_tokens;
  const int padded = (p.plan.token_stride - 64) / 16, thread = threadIdx.x;
  const auto* source = static_cast<const uint4*>(layer.input) + int64_t{p.pass.first_token} * pieces;
  const auto* norm = static_cast<const uint4*>(layer.norm_weight);
  if (norm) {
#pragma unroll 2
    for (int token = 0; token < tokens; ++token) {
      float sum = 0;
#pragma unroll 2
      for (int i = thread; i < pieces; i += kGemvThreads) {
        const uint4 x = source[token * pieces + i];
        sum = add_products(x, x, sum, Element{});
      }
      sum = warp_sum(sum);
      if (thread % 32 == 0) squares[token][thread / 32] = sum;
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int token = 0; token < tokens; ++token) {
    float factor = 0;
    if (norm) {
#pragma unroll
      for (int n = 0; n < kGemvWarps; ++n) factor += squares[token][n];
      factor = rsqrtf(factor / static_cast<float>(layer.num_inputs) + layer.epsilon);
    }
#pragma unroll 2
    for (int i = thread; i < padded; i += kGemvThreads) {
      uint4 x{};
      if (i < pieces) x = source[token * pieces + i];
      if (norm && i < pieces) x = scale_piece(x, factor, norm[i], Element{});
      store_inputs<kBits>(inputs + token * p.plan.token_stride, i, x);
    }
  }
  __syncthreads();
}

// Products of a tile over a warp's steps. Lane 4 g + t has the sums of rows g and g + 8 for tokens 2 t and
// 2 t + 1 of each eight.
template <typename Element, LowBitFormat kFormat, int kTokenTiles>
struct LowBitProducts {
  using Format = Codes<Element, kFormat>;
  static constexpr int kStepColumns = LowBitPlan::kRowBytes * 8 / Format::kBits;
  const LowBitStreamParams& p;
  uint32_t inputs;  // the lane's first piece, of token g
  float sums[kTokenTiles][4], parts[kTokenTiles][4];
  uint32_t scale_places[2], zero_places[2];  // the low bits of the lane's rows' addresses
  uint32_t zero_nibbles;

  __device__ __forceinline__ void start(int tile) {
    const int line = threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < 4 * kTokenTiles; ++n) sums[n / 4][n % 4] = parts[n / 4][n % 4] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const LowBitRow row = LowBitRow::of<kFormat>(p, tile, line + 8 * half);
      scale_places[half] = static_cast<uint32_t>(row.scales);
      zero_places[half] = static_cast<uint32_t>(row.zeros);
    }
  }
  // Of group `n` of the step, whose first group in the row is `group`.
  __device__ __forceinline__ uint32_t scale_bits(uint32_t stage, int group, int n, int half) const {
    const uint32_t bytes = p.plan.scale_bytes;
    const uint32_t within = (scale_places[half] + group * bytes & 3) + n * bytes;
    const uint32_t line = threadIdx.x % 32 / 4 + 8 * half;
    const uint32_t word = load_shared_word(stage + LowBitPlan::kCodesBytes + line * 8 + (within & 4));
    return word >> (within & 3) * 8;
  }
  __device__ __forceinline__ float scale(uint32_t stage, int group, int n, int half) const {
    const uint32_t bits = scale_bits(stage, group, n, half);
    if constexpr (kFormat == LowBitFormat::kFp8) return __uint_as_float(bits);
    if constexpr (kFormat == LowBitFormat::kMxfp4) return e8m0_value(bits & 0xFF);
    return Half<Element>::unpack(bits).x;
  }
  __device__ __forceinline__ uint32_t zero_offset(uint32_t stage, int group, int n, int half) const {
    if (!p.weight.zero_points) return Format::offset_of(kFormat == LowBitFormat::kInt4 ? 8 : 128);
    constexpr bool kNibbles = kFormat == LowBitFormat::kInt4;
    const uint32_t line = threadIdx.x % 32 / 4 + 8 * half;
    const uint32_t word =
        load_shared_word(stage + LowBitPlan::kCodesBytes + LowBitPlan::kScalesBytes + line * 4);
    const uint32_t first = zero_places[half] + (kNibbles ? group / 2 : group) & 3;
    if constexpr (kNibbles) return Format::offset_of(word >> (first * 8 + (group % 2 + n) * 4) & 15);
    return Format::offset_of(word >> (first + n) * 8 & 255);
  }
  // What expand subtracts, or multiplies by, in piece `n`.
  __device__ __forceinline__ uint32_t offset(uint32_t stage, int group, int piece, int half) const {
    if constexpr (Format::kInteger) return zero_offset(stage, group, piece / p.plan.group_pieces, half);
    if constexpr (kFormat == LowBitFormat::kNvfp4)
      return Format::offset_of(scale_bits(stage, group, 2 * piece + (threadIdx.x % 4) / 2, half) & 0xFF);
    return 0;
  }
  __device__ __forceinline__ void fold(uint32_t stage, int group, int n) {
    const float upper = scale(stage, group, n, 0), lower = scale(stage, group, n, 1);
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[tile][i] = fmaf(parts[tile][i], i < 2 ? upper : lower, sums[tile][i]);
        parts[tile][i] = 0;
      }
  }
  __device__ __forceinline__ void multiply(uint32_t stage, int step) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, group = first_group(p.plan, step);
    uint4 x[kTokenTiles];
    uint32_t offsets[2];
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
      const bool is_first = (piece & (p.plan.group_pieces - 1)) == 0;
      uint32_t pairs[2][Format::kPairs];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (is_first || kFormat == LowBitFormat::kNvfp4) offsets[half] = offset(stage, group, piece, half);
        const uint32_t word =
            load_shared_word(stage + half * 512 + (g * 4 + (piece ^ (g >> 1 & 3))) * 16 + t * 4);
        Format::expand(word, offsets[half], pairs[half]);
      }
      const bool loads = Format::kBits == 4 || piece % 2 == 0;
      const int column = step * kStepColumns + (Format::kBits == 4 ? piece : piece / 2) * 32;
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        if (loads) {
          x[tile] = uint4{};
          if (g + tile * 8 < p.pass.num_tokens)
            x[tile] = load_shared_16(inputs + tile * 8 * p.plan.token_stride + column * 2);
        }
        const uint32_t first[] = {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]};
        if (loads)
          Half<Element>::multiply_add(parts[tile], first, x[tile].x, x[tile].y);
        else
          Half<Element>::multiply_add(parts[tile], first, x[tile].z, x[tile].w);
        if constexpr (Format::kBits == 4) {
          const uint32_t second[] = {pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3]};
          Half<Element>::multiply_add(parts[tile], second, x[tile].z, x[tile].w);
        }
      }
      if (kFormat != LowBitFormat::kNvfp4 && (piece + 1 & (p.plan.group_pieces - 1)) == 0)
        fold(stage, group, piece / p.plan.group_pieces);
    }
  }
  // To `target` [rows, tokens].
  __device__ __forceinline__ void store(float* target) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const auto& from = kFormat == LowBitFormat::kNvfp4 ? parts : sums;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2*>(target + (g + 8 * half) * 8 * kTokenTiles + tile * 8 + 2 * t) =
            make_float2(from[tile][2 * half], from[tile][2 * half + 1]);
  }
};

// Outputs of a turn's tiles, from the warps' sums [tile, warp, row, token].
template <typename Element, LowBitFormat kFormat, int kTokenTiles>
__device__ __forceinline__ void finish_low_bit_turn(const LowBitStreamParams& p, const float* sums,
                                                    int first_tile, int tiles, int rotation) {
  constexpr int kTokens = 8 * kTokenTiles, kTileSums = kGemvWarps * 16 * kTokens;
  const bool gated = p.linear.activation != GatedActivation::kNone;
  const int outputs = gated ? 8 : 16, tokens = p.pass.num_tokens;
  const auto sum_of = [&](int tile, int row, int token, int64_t weight_row) {
    const float* first = sums + tile * kTileSums + row * kTokens + token;
    float sum = *first;
#pragma unroll
    for (int warp = 1; warp < kGemvWarps; ++warp) sum += first[warp * 16 * kTokens];
    return kFormat == LowBitFormat::kNvfp4 ? sum * p.weight.float_scales[weight_row] : sum;
  };
#pragma unroll 1
  for (int i = (static_cast<int>(threadIdx.x) + rotation * 32) % kGemvThreads; i < tiles * outputs * tokens;
       i += kGemvThreads) {
    const int row = i % outputs, tile = i / outputs % tiles, token = i / outputs / tiles;
    const int64_t output = int64_t{first_tile + tile * static_cast<int>(gridDim.x)} * outputs + row;
    if (output >= p.linear.num_outputs) continue;
    Element residual{};
    if (p.linear.residual) residual = load_residual<Element>(p.linear, p.pass.first_token + token, output);
    const float gate = sum_of(tile, row, token, output);
    const float factor = gated ? sum_of(tile, row + 8, token, p.linear.num_outputs + output) : 0.0f;
    store_output<Element>(p.linear, p.pass.first_token + token, output, gate, factor, residual);
  }
}

// kDepth: steps of a warp on their way.
template <typename Element, LowBitFormat kFormat, int kTokenTiles, int kDepth>
__global__ void __launch_bounds__(kGemvThreads, 2)
    low_bit_stream_kernel(const __grid_constant__ LowBitStreamParams p) {
  constexpr int kTileSums = LowBitPlan::sums_bytes<kTokenTiles>() / 4;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const LowBitPlan& plan = p.plan;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t ring = shared_address(shared_memory) + warp * kDepth * LowBitPlan::kStageBytes;
  auto* sums = reinterpret_cast<float*>(shared_memory + kGemvWarps * kDepth * LowBitPlan::kStageBytes);
  const uint32_t inputs = shared_address(sums) + 2 * plan.turn_tiles * kTileSums * 4;
  const int first = warp * plan.steps / kGemvWarps, end = (warp + 1) * plan.steps / kGemvWarps;
  const LowBitCursor start{first < end ? static_cast<int>(blockIdx.x) : plan.tiles, first, first, end};

  LowBitFetcher<kFormat> fetcher{p, ring, start, {}, {}};
  if (!start.done(plan)) fetcher.aim();
#pragma unroll 1
  for (int n = 0; n < kDepth; ++n) fetcher.fetch(n);
  launch_dependents();
  wait_for_previous_kernel();
  load_low_bit_inputs<Element, Codes<Element, kFormat>::kBits, 8 * kTokenTiles>(p, inputs);

  LowBitProducts<Element, kFormat, kTokenTiles> products{
      p, inputs + lane / 4 * plan.token_stride + lane % 4 * 16};
  int place = 0, turn = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < plan.tiles; ++turn) {
    float* turn_sums = sums + turn % 2 * plan.turn_tiles * kTileSums;
    const int first_tile = tile;
    int count = 0;
#pragma unroll 1
    for (; count < plan.turn_tiles && tile < plan.tiles; ++count, tile += static_cast<int>(gridDim.x)) {
      products.start(tile);
#pragma unroll 1
      for (int step = first; step < end; ++step) {
        copy_async_wait<kDepth - 1>();
        __syncwarp();
        products.multiply(ring + place * LowBitPlan::kStageBytes, step);
        __syncwarp();
        fetcher.fetch(place);
        if (++place == kDepth) place = 0;
      }
      products.store(turn_sums + count * kTileSums + warp * 16 * 8 * kTokenTiles);
    }
    __syncthreads();
    finish_low_bit_turn<Element, kFormat, kTokenTiles>(p, turn_sums, first_tile, count, turn);
  }
}

}  // namespace ortolan::cuda
