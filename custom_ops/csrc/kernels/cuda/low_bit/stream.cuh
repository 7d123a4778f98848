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

#include "stream_inputs.cuh"

namespace ortolan::cuda {

// As copy_async_16, where memory is read in pieces of 128 bytes.
__device__ __forceinline__ void copy_codes(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_word(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
               : "memory");
}

// The warp's steps, tile after tile, as it fetches or multiplies them.
struct LowBitCursor {
  int tile, step, first, end, stride;

  __device__ __forceinline__ bool done(const LowBitPlan& plan) const { return tile >= plan.tiles; }
  // Whether the tile has changed.
  __device__ __forceinline__ bool advance() {
    if (++step < end) return false;
    step = first;
    tile += stride;
    return true;
  }
};

// The row of the weight that is a line of a tile.
__device__ __forceinline__ int row_of(const LowBitStreamParams& p, int tile, int line) {
  const int outputs = static_cast<int>(p.linear.num_outputs);
  const bool gated = p.linear.activation != GatedActivation::kNone;
  return gated ? min(tile * 8 + line % 8, outputs - 1) + (line >= 8 ? outputs : 0)
               : min(tile * 16 + line, outputs - 1);
}

// What a kernel is compiled for.
template <typename E, LowBitFormat kF, bool kZ, bool kS>
struct LowBitKind {
  using Element = E;
  using Format = Codes<E, kF>;
  static constexpr LowBitFormat kFormat = kF;
  static constexpr bool kZeros = kZ;  // zero points are given
  static constexpr bool kShort = kS;  // groups are shorter than a step
  static constexpr int kScaleBytes = kF == LowBitFormat::kFp8 ? 4 : Format::kInteger ? 2 : 1;

  // Bytes of the group's scale and zero point after those of the row.
  static __device__ __forceinline__ int scale_byte(int group) { return group * kScaleBytes; }
  static __device__ __forceinline__ int zero_byte(int group) {
    return kF == LowBitFormat::kInt4 ? group / 2 : group;
  }
  static __host__ __device__ __forceinline__ const uint8_t* scales(const LowBitWeight& w) {
    if constexpr (kF == LowBitFormat::kFp8) return reinterpret_cast<const uint8_t*>(w.float_scales);
    if constexpr (Format::kInteger) return static_cast<const uint8_t*>(w.scales);
    return w.scale_codes;
  }
};

// Fetches a warp's steps into its ring.
template <typename Kind>
struct LowBitFetcher {
  const LowBitStreamParams& p;
  uint32_t ring;
  LowBitCursor at;
  const uint8_t *codes[2], *scales, *zeros;  // of the lane's rows, and of the row whose scales it copies
  uint32_t target, scale_target;             // of the lane, in a stage

  __device__ __forceinline__ void start() {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    target = ring + (g * 4 + (t ^ (g >> 1 & 3))) * 16;
    scale_target = ring + LowBitPlan::kCodesBytes + lane % 16 * 8 + lane / 16 * 4;
    if (!at.done(p.plan)) aim();
  }
  __device__ __forceinline__ void aim() {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      codes[half] = p.weight.codes + int64_t{row_of(p, at.tile, lane / 4 + 8 * half)} * p.plan.row_bytes;
    const int row = row_of(p, at.tile, lane % 16);
    scales = Kind::scales(p.weight) + int64_t{row >> p.plan.scale_rows_shift} * p.plan.scale_row_bytes;
    if (Kind::kZeros) zeros = p.weight.zero_points + int64_t{row} * p.plan.zero_row_bytes;
  }
  static __device__ __forceinline__ const uint8_t* whole_word(const uint8_t* byte) {
    return reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(byte) & ~uintptr_t{3});
  }
  __device__ __forceinline__ void fetch(int place) {
    if (!at.done(p.plan)) {
      const int lane = threadIdx.x % 32, stage = place * LowBitPlan::kStageBytes;
      const int byte = at.step * LowBitPlan::kRowBytes + lane % 4 * 16;
      const bool valid = byte < p.plan.row_bytes;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        copy_codes(target + stage + half * 512, codes[half] + (valid ? byte : 0), valid);
      const int group = p.plan.first_group(at.step), first = Kind::scale_byte(group) + lane / 16 * 4;
      if (lane / 16 < p.plan.scale_words) {
        const uint8_t* word = whole_word(scales + first);
        const bool within = lane < 16 || word < scales + p.plan.scale_row_bytes;
        copy_word(scale_target + stage, within ? word : whole_word(scales), within);
      }
      if (Kind::kZeros && lane < 16)
        copy_word(ring + stage + LowBitPlan::kCodesBytes + LowBitPlan::kScalesBytes + lane * 4,
                  whole_word(zeros + Kind::zero_byte(group)), true);
      if (at.advance() && !at.done(p.plan)) aim();
    }
    copy_async_commit();
  }
};

// The scales of a step's groups, of one row.
template <typename Kind>
struct StepScales {
  uint2 words;  // from the first group's on

  // `first`: the low bits of its address.
  static __device__ __forceinline__ StepScales load(uint32_t line, uint32_t first) {
    if constexpr (Kind::kScaleBytes == 4) return {{load_shared_word(line), 0}};
    const uint2 stored = load_shared_8(line);
    const uint32_t bits = (first & 3) * 8;
    return {{__funnelshift_r(stored.x, stored.y, bits), stored.y >> bits}};
  }
  // Its low bits are those of the scale of group `n`.
  __device__ __forceinline__ uint32_t bits(int n) const {
    const int byte = n * Kind::kScaleBytes;
    return (byte < 4 ? words.x : words.y) >> byte % 4 * 8;
  }
  // Whether all of four codes of mxfp4 are exponents of normal numbers, as they are but for weights of zero.
  __device__ __forceinline__ bool are_normal() const {
    return ((words.x - 0x01010101u) & ~words.x & 0x80808080u) == 0;
  }
  __device__ __forceinline__ float normal_value(int n) const {
    return __uint_as_float((n < 3 ? words.x << (23 - 8 * n) : words.x >> 1) & 0x7F800000u);
  }
  __device__ __forceinline__ float value(int n) const {
    if constexpr (Kind::kFormat == LowBitFormat::kFp8) return __uint_as_float(words.x);
    if constexpr (Kind::kFormat == LowBitFormat::kMxfp4) return e8m0_value(bits(n) & 0xFF);
    return Half<typename Kind::Element>::unpack(bits(n)).x;
  }
};

// Products of a tile over a warp's steps. Lane 4 g + t has the sums of rows g and g + 8 for tokens 2 t and
// 2 t + 1 of each eight. The four pieces of a step have sums of their own, so that tensor cores need not wait
// for one after another.
template <typename Kind, int kTokenTiles>
struct LowBitProducts {
  using Element = typename Kind::Element;
  using Format = typename Kind::Format;
  using Sums = float[kTokenTiles][4];
  static constexpr LowBitFormat kFormat = Kind::kFormat;
  static constexpr bool kScaledPairs = kFormat == LowBitFormat::kNvfp4;  // not sums
  static constexpr int kPieces = 4;
  static constexpr int kStepColumns = LowBitPlan::kRowBytes * 8 / Format::kBits;
  const LowBitStreamParams& p;
  uint32_t inputs[kTokenTiles];  // the lane's first piece, of its token; of another one where there is none
  uint32_t codes, lines;         // where the lane's codes and scales lie in a stage
  Sums sums;
  uint32_t scale_places[2], zero_places[2];  // the low bits of the lane's rows' addresses

  __device__ __forceinline__ void prepare(uint32_t first_input) {
    const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile)
      inputs[tile] =
          first_input + min(g + 8 * tile, p.pass.num_tokens - 1) * p.plan.token_stride + lane % 4 * 16;
    codes = g * 64 + lane % 4 * 4;
    lines = LowBitPlan::kCodesBytes + g * 8;
  }
  __device__ __forceinline__ void start(int tile) {
    const int line = threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < 4 * kTokenTiles; ++n) sums[n / 4][n % 4] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(p, tile, line + 8 * half);
      scale_places[half] = (row >> p.plan.scale_rows_shift) * p.plan.scale_row_bytes;
      if (Kind::kZeros) zero_places[half] = row * p.plan.zero_row_bytes;
    }
  }
  __device__ __forceinline__ uint32_t zero_offset(uint32_t stage, int group, int n, int half) const {
    constexpr bool kNibbles = kFormat == LowBitFormat::kInt4;
    if constexpr (!Kind::kZeros) return Format::offset_of(kNibbles ? 8 : 128);
    const uint32_t line = threadIdx.x % 32 / 4 + 8 * half;
    const uint32_t word =
        load_shared_word(stage + LowBitPlan::kCodesBytes + LowBitPlan::kScalesBytes + line * 4);
    const uint32_t first = zero_places[half] + Kind::zero_byte(group) & 3;
    if constexpr (kNibbles) return Format::offset_of(word >> (first * 8 + (group % 2 + n) * 4) & 15);
    return Format::offset_of(word >> (first + n) * 8 & 255);
  }
  // The group of a piece of 16 bytes of codes, counted from the step's first.
  __device__ __forceinline__ int group_of(int piece) const {
    if constexpr (kFormat == LowBitFormat::kMxfp4) return piece;
    return Kind::kShort ? piece * p.plan.step_groups / kPieces : 0;
  }
  // What expand subtracts, or multiplies by.
  __device__ __forceinline__ uint32_t offset(uint32_t stage, const StepScales<Kind>& scales, int group,
                                             int piece, int half) const {
    if constexpr (Format::kInteger) return zero_offset(stage, group, group_of(piece), half);
    if constexpr (kScaledPairs)
      return Format::offset_of(scales.bits(2 * piece) >> (threadIdx.x % 4) / 2 * 8 & 0xFF);
    return 0;
  }
  __device__ __forceinline__ void add(const Sums& parts, float upper, float lower) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[tile][i] = fmaf(parts[tile][i], i < 2 ? upper : lower, sums[tile][i]);
  }
  // Scales the sums of all pieces, which may share a group.
  __device__ __forceinline__ void fold(Sums (&parts)[kPieces], const StepScales<Kind> (&scales)[2]) {
    constexpr bool kOwnGroups = Kind::kShort && !kScaledPairs;
    if (kFormat == LowBitFormat::kMxfp4 && scales[0].are_normal() && scales[1].are_normal()) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        add(parts[piece], scales[0].normal_value(piece), scales[1].normal_value(piece));
    } else if constexpr (kOwnGroups) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        add(parts[piece], scales[0].value(group_of(piece)), scales[1].value(group_of(piece)));
    } else {
#pragma unroll
      for (int n = 0; n < 4 * kTokenTiles; ++n)
        parts[0][n / 4][n % 4] = (parts[0][n / 4][n % 4] + parts[1][n / 4][n % 4]) +
                                 (parts[2][n / 4][n % 4] + parts[3][n / 4][n % 4]);
      const bool scaled = !kScaledPairs;
      add(parts[0], scaled ? scales[0].value(0) : 1.0f, scaled ? scales[1].value(0) : 1.0f);
    }
  }
  __device__ __forceinline__ void multiply_piece(Sums& parts, const uint32_t (&pairs)[2][Format::kPairs],
                                                 int piece, const uint4 (&x)[kTokenTiles]) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const uint32_t first[] = {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]};
      if (Format::kBits == 4 || piece % 2 == 0)
        Half<Element>::multiply_add(parts[tile], first, x[tile].x, x[tile].y);
      else
        Half<Element>::multiply_add(parts[tile], first, x[tile].z, x[tile].w);
      if constexpr (Format::kBits == 4) {
        const uint32_t second[] = {pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3]};
        Half<Element>::multiply_add(parts[tile], second, x[tile].z, x[tile].w);
      }
    }
  }
  __device__ __forceinline__ void multiply(uint32_t stage, int step) {
    const int swizzle = threadIdx.x % 32 / 8, group = p.plan.first_group(step);
    Sums parts[kPieces] = {};
    StepScales<Kind> scales[2];
    uint4 x[kTokenTiles];
    uint32_t offsets[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      scales[half] =
          StepScales<Kind>::load(stage + lines + half * 64, scale_places[half] + Kind::scale_byte(group));
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      uint32_t pairs[2][Format::kPairs];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (piece == 0 || Kind::kShort) offsets[half] = offset(stage, scales[half], group, piece, half);
        const uint32_t word = load_shared_word(stage + codes + half * 512 + (piece ^ swizzle) * 16);
        Format::expand(word, offsets[half], pairs[half]);
      }
      if (Format::kBits == 4 || piece % 2 == 0)
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile)
          x[tile] = load_shared_16(inputs[tile] + step * kStepColumns * 2 +
                                   (Format::kBits == 4 ? piece : piece / 2) * 64);
      multiply_piece(parts[piece], pairs, piece, x);
    }
    fold(parts, scales);
  }
  // To `target` [rows, tokens].
  __device__ __forceinline__ void store(float* target) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2*>(target + (g + 8 * half) * 8 * kTokenTiles + tile * 8 + 2 * t) =
            make_float2(sums[tile][2 * half], sums[tile][2 * half + 1]);
  }
};

// Outputs of a turn's tiles, from the warps' sums [tile, warp, row, token]. Each turn begins with another
// warp.
template <typename Element, LowBitFormat kFormat, int kTokenTiles, int kTeams>
__device__ __forceinline__ void finish_low_bit_turn(const LowBitStreamParams& p, const float* sums,
                                                    int first_tile, int turn) {
  constexpr int kTokens = 8 * kTokenTiles, kTileSums = kGemvWarps * 16 * kTokens;
  constexpr int kThreads = kTeams * kGemvThreads;
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
  for (int i = (static_cast<int>(threadIdx.x) + turn * 32) % kThreads; i < kTeams * outputs * tokens;
       i += kThreads) {
    const int row = i % outputs, tile = i / outputs % kTeams, token = i / outputs / kTeams;
    const int64_t output = int64_t{first_tile + tile} * outputs + row;
    if (output >= p.linear.num_outputs) continue;
    Element residual{};
    if (p.linear.residual) residual = load_beside<Element>(p.linear, p.pass.first_token + token, output);
    const float gate = sum_of(tile, row, token, output);
    const float factor = gated ? sum_of(tile, row + 8, token, p.linear.num_outputs + output) : 0.0f;
    store_output<Element>(p.linear, p.pass.first_token + token, output, gate, factor, residual);
  }
}

// kTeams: of eight warps, which take the tiles of a turn by turns; kDepth: steps of a warp on their way.
template <typename Kind, int kTokenTiles, int kTeams, int kDepth>
__global__ void __launch_bounds__(kTeams* kGemvThreads, 2 / kTeams)
    low_bit_stream_kernel(const __grid_constant__ LowBitStreamParams p) {
  using Element = typename Kind::Element;
  constexpr int kTileSums = LowBitPlan::sums_bytes<kTokenTiles>() / 4;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const LowBitPlan& plan = p.plan;
  const int warp = threadIdx.x / 32 % kGemvWarps, team = threadIdx.x / kGemvThreads;
  const uint32_t ring = shared_address(shared_memory) + threadIdx.x / 32 * kDepth * LowBitPlan::kStageBytes;
  auto* sums =
      reinterpret_cast<float*>(shared_memory + kTeams * kGemvWarps * kDepth * LowBitPlan::kStageBytes);
  const uint32_t inputs = shared_address(sums) + 2 * kTeams * kTileSums * 4;
  const int first = warp * plan.steps / kGemvWarps, end = (warp + 1) * plan.steps / kGemvWarps;
  const int stride = static_cast<int>(gridDim.x) * kTeams;
  const int own = static_cast<int>(blockIdx.x) * kTeams + team;
  const LowBitCursor start{first < end ? own : plan.tiles, first, first, end, stride};

  LowBitFetcher<Kind> fetcher{p, ring, start};
  fetcher.start();
#pragma unroll 1
  for (int n = 0; n < kDepth; ++n) fetcher.fetch(n);
  launch_dependents();
  wait_for_previous_kernel();
  load_low_bit_inputs<Element, Kind::Format::kBits, 8 * kTokenTiles, kTeams>(p, inputs);

  LowBitProducts<Kind, kTokenTiles> products{p};
  products.prepare(inputs);
  int place = 0, turn = 0;
#pragma unroll 1
  for (int turn_tile = blockIdx.x * kTeams; turn_tile < plan.tiles; turn_tile += stride, ++turn) {
    float* turn_sums = sums + turn % 2 * kTeams * kTileSums;
    if (turn_tile + team < plan.tiles) {
      products.start(turn_tile + team);
#pragma unroll 1
      for (int step = first; step < end; ++step) {
        copy_async_wait<kDepth - 1>();
        __syncwarp();
        products.multiply(ring + place * LowBitPlan::kStageBytes, step);
        __syncwarp();
        fetcher.fetch(place);
        if (++place == kDepth) place = 0;
      }
      products.store(turn_sums + team * kTileSums + warp * 16 * 8 * kTokenTiles);
    }
    __syncthreads();
    finish_low_bit_turn<Element, Kind::kFormat, kTokenTiles, kTeams>(p, turn_sums, turn_tile, turn);
  }
}

}  // namespace ortolan::cuda
