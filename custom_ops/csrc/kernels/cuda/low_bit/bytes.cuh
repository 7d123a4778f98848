// Products of up to 16 tokens of 16-bit elements with int4 and int8 weights, on integer tensor cores.
//
// A token's inputs are rounded to 16-bit numbers, 256 columns at a time with a power of two of their own:
// what has 8 bits and is no smaller than a 128th of the largest stays as it is. Each number is two bytes.
// Codes are bytes, or become bytes by one mask; tensor cores multiply 16 lines of codes by 8 columns of
// bytes, two of each token, and a group's sum is exact. It is scaled in float32.
//
// Weights stream through shared memory once, as they lie in memory, in units of 16 lines by 128 bytes. Blocks
// take tiles of 16 lines in turn, in a gated layer the gates and factors of 8 outputs; a block's warps take
// its units in turn, each through a ring of its own, which fills before the kernel in front has ended (no
// kernel writes weights). Once a warp has no more to fetch the next kernel may start. A row's sum is that of
// its units in one order, which depends on the layer alone.
#pragma once

#include "bytes_inputs.cuh"

namespace ortolan::cuda {

__device__ __forceinline__ void copy_word(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(shared), "l"(global) : "memory");
}
// sum[16x8] += a[16x32] * b[32x8], of bytes without and with a sign.
__device__ __forceinline__ void multiply_bytes(int (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Outputs of a tile.
__device__ __forceinline__ int tile_outputs(const ByteStreamParams& p) {
  return p.linear.activation == GatedActivation::kNone ? 16 : 8;
}

// Fetches a warp's units into its ring: slice after slice of a tile, tile after tile of the block.
template <LowBitFormat kFormat, bool kZeros, int kDepth>
struct ByteFetcher {
  const ByteStreamParams& p;
  uint32_t target, word_target;  // of the lane, in the first stage
  const uint8_t* codes;          // of the lane's first line
  const uint8_t* words;          // of its line's scales or zero points
  int slice, column;             // of the next unit; of the lane's bytes in it
  int lines;                     // of weights, from the lane's first one on
  int word_lines, row;           // the same, and the row, of the line whose word the lane copies
  int remaining;                 // units until the last

  __device__ __forceinline__ ByteFetcher(const ByteStreamParams& p, uint32_t ring, int units) : p(p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = lane % 16;
    const auto outputs = static_cast<int>(p.linear.num_outputs);
    target = ring + lane / 8 * 128 + (lane % 8 ^ (lane / 8 & 1) * 4) * 16;
    word_target = ring + BytePlan::kCodesBytes + lane * 4;
    remaining = units - warp;
    slice = warp % p.plan.slices;
    const int tile = warp / p.plan.slices * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
    const int first_output = tile * tile_outputs(p);
    column = lane % 8 * 16;
    codes = p.weight.codes + (int64_t{first_output} + lane / 8) * p.plan.row_bytes + slice * 128 + column;
    words = lane < 16 ? static_cast<const uint8_t*>(p.weight.scales) : p.weight.zero_points;
    lines = outputs - first_output - lane / 8;
    const bool is_factor = p.plan.later_lines == 0 && line >= 8;
    word_lines = outputs - first_output - (p.plan.later_lines == 0 ? line % 8 : line);
    row = first_output + (is_factor ? outputs + line - 8 : line);
  }
  __device__ __forceinline__ void fetch_word(int place) const {
    const int lane = threadIdx.x % 32, group = p.plan.first_group(slice);
    if (lane >= (kZeros ? 32 : 16) || word_lines <= 0) return;
    int64_t byte = 2 * (int64_t{row} * p.plan.groups + group);
    if (kZeros && lane >= 16)
      byte = int64_t{row} * p.plan.zero_row_bytes + (kFormat == LowBitFormat::kInt4 ? group / 2 : group);
    copy_word(word_target + place * BytePlan::kStageBytes, words + (byte & ~int64_t{3}));
  }
  __device__ __forceinline__ void fetch(int place) {
    if (remaining > 0) {
      const uint32_t stage = target + place * BytePlan::kStageBytes;
      const int valid = slice * BytePlan::kRowBytes + column < p.plan.row_bytes ? lines : 0;
      const uint8_t* later = codes + p.plan.line_bytes;
      const int64_t four = 4 * p.plan.row_bytes;
      copy_async_16(stage, codes, valid > 0);
      copy_async_16(stage + 512, codes + four, valid > 4);
      copy_async_16(stage + 1024, later, valid > p.plan.later_lines);
      copy_async_16(stage + 1536, later + four, valid > 4 + p.plan.later_lines);
      fetch_word(place);
      slice += p.plan.slice_step;
      const bool wraps = slice >= p.plan.slices;
      const int step = wraps ? p.plan.steps[1] : p.plan.steps[0];
      if (wraps) slice -= p.plan.slices;
      codes += wraps ? p.plan.leaps[1] : p.plan.leaps[0];
      lines -= step;
      word_lines -= step;
      row += step;
      remaining -= BytePlan::kWarps;
      if (remaining <= 0) launch_dependents();
    }
    copy_async_commit();
  }
};

// Products of a unit. Lane 4 g + t has the sums of lines g and g + 8 for token t of each four.
template <typename Element, LowBitFormat kFormat, bool kZeros, int kTokenTiles>
struct ByteProducts {
  static constexpr bool kNibbles = kFormat == LowBitFormat::kInt4;
  static constexpr int kBlocks = kNibbles ? 2 : 1;  // of 128 columns, in a slice
  const ByteStreamParams& p;
  uint32_t inputs[kTokenTiles];  // the lane's, of its token; of another one where there is none
  const float2* facts[kTokenTiles];
  uint32_t codes;                           // where the lane's codes lie in a stage
  uint32_t scale_parity[2], zero_place[2];  // of the lane's lines' first scale and zero point
  float sums[kTokenTiles][2];

  __device__ __forceinline__ void prepare(uint32_t first_input, const float2* first_fact) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, last = p.pass.num_tokens - 1;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      inputs[tile] = first_input + (2 * min(g / 2 + 4 * tile, last) + g % 2) * p.plan.plane_stride + t * 16;
      facts[tile] = first_fact + min(t + 4 * tile, last);
    }
    codes = g * 128 + (t ^ (g & 1) * 4) * 16;
    const bool gated = p.linear.activation != GatedActivation::kNone;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // a tile begins at a multiple of 8
      const int row = g + (gated && half ? static_cast<int>(p.linear.num_outputs) : 0);
      scale_parity[half] = p.plan.paired ? 0 : row * p.plan.groups;
      zero_place[half] = row * p.plan.zero_row_bytes;
    }
  }
  // What a line's code stands for 0 at.
  __device__ __forceinline__ int zero_of(uint32_t stage, int half, int group) const {
    if constexpr (!kZeros) return kNibbles ? 8 : 128;
    const int line = threadIdx.x % 32 / 4 + 8 * half;
    const uint32_t word = load_shared_word(stage + BytePlan::kCodesBytes + 64 + line * 4);
    const uint32_t bits = word >> (zero_place[half] + (kNibbles ? group / 2 : group) & 3) * 8;
    return kNibbles ? bits >> (group & 1) * 4 & 15 : bits & 255;
  }
  // The scales of the lane's lines, of group `n` of the slice.
  __device__ __forceinline__ float scale_of(uint32_t stage, int half, int group) const {
    const int line = threadIdx.x % 32 / 4 + 8 * half;
    const uint32_t place = scale_parity[half] + group & 1;
    uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];\n"
                 : "=h"(bits)
                 : "r"(stage + BytePlan::kCodesBytes + line * 4 + place * 2)
                 : "memory");
    return Half<Element>::unpack(bits).x;
  }
  // Adds what 128 columns' sums are worth: of high and low bytes, of the first line and the second.
  __device__ __forceinline__ void fold(int tile, int block, const int (&parts)[4], const float (&scales)[2],
                                       const int (&zeros)[2]) {
    const float2 fact = facts[tile][block * p.pass.num_tokens];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int number = parts[2 * half] * 256 + parts[2 * half + 1] - zeros[half] * __float_as_int(fact.y);
      sums[tile][half] = fmaf(static_cast<float>(number), scales[half] * fact.x, sums[tile][half]);
    }
  }
  // Of 16 bytes of codes of both lines: the products of 128 columns of int4, or 64 of int8.
  __device__ __forceinline__ void multiply_chunk(int (&parts)[4], const uint4& upper, const uint4& lower,
                                                 uint32_t x) const {
    const uint32_t lines[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
    int even[4] = {}, odd[4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t a[] = {lines[0][2 * n], lines[1][2 * n], lines[0][2 * n + 1], lines[1][2 * n + 1]};
      if constexpr (kNibbles) {
        const uint4 b = load_shared_16(x + n * 64);
        uint32_t low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] = a[i] & 0x0F0F0F0Fu, high[i] = a[i] & 0xF0F0F0F0u;
        multiply_bytes(even, low, b.x, b.y);
        multiply_bytes(odd, high, b.z, b.w);
      } else {
        const uint2 b = load_shared_8(x + n * 8);
        multiply_bytes(parts, a, b.x, b.y);
      }
    }
    if constexpr (kNibbles)
#pragma unroll
      for (int i = 0; i < 4; ++i) parts[i] = even[i] * 16 + odd[i];
  }
  __device__ __forceinline__ void multiply(uint32_t stage, int slice) {
    const int first_group = p.plan.first_group(slice);
    uint4 upper[2], lower[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      upper[n] = load_shared_16(stage + (codes ^ n * 64));
      lower[n] = load_shared_16(stage + (codes ^ n * 64) + 1024);
    }
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) sums[tile][0] = sums[tile][1] = 0;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const int block = kBlocks * slice + n, group = p.plan.paired ? first_group + n : first_group;
      const float scales[] = {scale_of(stage, 0, group), scale_of(stage, 1, group)};
      const int zeros[] = {zero_of(stage, 0, group), zero_of(stage, 1, group)};
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        const uint32_t x = inputs[tile] + block * BytePlan::kBlockColumns;
        int parts[4] = {};
        multiply_chunk(parts, upper[n], lower[n], x);
        if constexpr (!kNibbles) multiply_chunk(parts, upper[1], lower[1], x + 64);
        fold(tile, block, parts, scales, zeros);
      }
    }
  }
  // To `target` [tokens, lines].
  __device__ __forceinline__ void store(float* target) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile)
      if (t + 4 * tile < p.pass.num_tokens) {
        target[(t + 4 * tile) * BytePlan::kLines + g] = sums[tile][0];
        target[(t + 4 * tile) * BytePlan::kLines + g + 8] = sums[tile][1];
      }
  }
};

// The outputs of a turn's tiles, from their units' parts [tile, slice, token, line].
template <typename Element>
__device__ __forceinline__ void finish_byte_turn(const ByteStreamParams& p, const float* parts,
                                                 const float* factors, int first_tile, int tiles) {
  const bool gated = p.linear.activation != GatedActivation::kNone;
  const int outputs = tile_outputs(p), tokens = p.pass.num_tokens;
  const auto sum_of = [&](int tile, int token, int line) {
    const float* part = parts + (tile * p.plan.slices * tokens + token) * BytePlan::kLines + line;
    const int stride = tokens * BytePlan::kLines;
    float sums[4] = {};
#pragma unroll 2
    for (int first = 0; first < p.plan.slices; first += 4)
#pragma unroll
      for (int n = 0; n < 4; ++n)
        if (first + n < p.plan.slices) sums[n] += part[(first + n) * stride];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < tiles * outputs * tokens; i += BytePlan::kThreads) {
    const int row = i % outputs, token = i / outputs % tokens, tile = i / outputs / tokens;
    const int64_t output = ((first_tile + tile) * int64_t{gridDim.x} + blockIdx.x) * outputs + row;
    if (output >= p.linear.num_outputs) continue;
    Element residual{};
    if (p.linear.residual) residual = load_residual<Element>(p.linear, p.pass.first_token + token, output);
    const float norm = p.linear.norm_weight ? factors[token] : 1.0f;
    const float gate = sum_of(tile, token, row) * norm;
    const float factor = gated ? sum_of(tile, token, row + 8) * norm : 0.0f;
    store_output<Element>(p.linear, p.pass.first_token + token, output, gate, factor, residual);
  }
}

// kDepth: units of a warp on their way.
template <typename Element, LowBitFormat kFormat, bool kZeros, int kTokenTiles, int kDepth>
__global__ void __launch_bounds__(BytePlan::kThreads, kTokenTiles < 4 ? 2 : 1)
    low_bit_bytes_kernel(const __grid_constant__ ByteStreamParams p) {
  constexpr int kRingBytes = BytePlan::kWarps * kDepth * BytePlan::kStageBytes;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const BytePlan& plan = p.plan;
  const int warp = threadIdx.x / 32, tokens = p.pass.num_tokens;
  const int tiles = (plan.tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                    static_cast<int>(gridDim.x);
  __shared__ float factors[16];
  auto* parts = reinterpret_cast<float*>(shared_memory + plan.parts_offset(kRingBytes, tokens));
  int turn_parts = plan.parts(tokens);  // from this turn's to the next one's
  const ByteShared shared{shared_address(shared_memory) + kRingBytes,
                          reinterpret_cast<float2*>(shared_memory + plan.facts_offset(kRingBytes, tokens)),
                          parts + turn_parts, factors};
  const uint32_t ring = shared_address(shared_memory) + warp * kDepth * BytePlan::kStageBytes;

  ByteFetcher<kFormat, kZeros, kDepth> fetcher(p, ring, tiles * plan.slices);
#pragma unroll 1
  for (int n = 0; n < kDepth; ++n) fetcher.fetch(n);
  wait_for_previous_kernel();
  constexpr int kBits = static_cast<int>(code_bits(kFormat));
  if (p.linear.norm_weight)
    load_byte_inputs<Element, kBits, true>(p, shared);
  else
    load_byte_inputs<Element, kBits, false>(p, shared);

  ByteProducts<Element, kFormat, kZeros, kTokenTiles> products{p};
  products.prepare(shared.inputs, shared.facts);
  int place = 0, unit = warp, slice = warp % plan.slices;
#pragma unroll 1
  for (int first = 0; first < tiles; first += plan.turn_tiles) {
    const int end = min(first + plan.turn_tiles, tiles), end_unit = end * plan.slices;
#pragma unroll 1
    for (; unit < end_unit; unit += BytePlan::kWarps) {
      copy_async_wait<kDepth - 1>();
      __syncwarp();
      products.multiply(ring + place * BytePlan::kStageBytes, slice);
      products.store(parts + (unit - first * plan.slices) * tokens * BytePlan::kLines);
      __syncwarp();
      fetcher.fetch(place);
      if (++place == kDepth) place = 0;
      slice += plan.slice_step;
      if (slice >= plan.slices) slice -= plan.slices;
    }
    __syncthreads();
    finish_byte_turn<Element>(p, parts, shared.factors, first, end - first);
    parts += turn_parts;
    turn_parts = -turn_parts;
  }
}

}  // namespace ortolan::cuda
