// Products of up to 8 tokens of 16-bit elements with int4 and int8 weights, on integer tensor cores.
//
// A token's inputs are rounded to 16-bit numbers, those that meet 128 bytes of a row's codes with a power of
// two of their own: what has 8 bits and is no smaller than a 128th of the largest stays as it is. Each number
// is two bytes. Codes are bytes, or become bytes by one mask; tensor cores multiply 16 lines of codes by 8
// columns of bytes, two of each token, and a group's sum is exact. It is scaled in float32.
//
// Weights stream through shared memory once, as they lie in memory, in units of 16 lines by 128 bytes. Blocks
// take tiles of 16 lines in turn, in a gated layer the gates and factors of 8 outputs. The warps of a team
// share a tile's columns, always the same ones: each rounds the inputs that it multiplies and waits for no
// other warp before it starts. Its units go through a ring of its own, which fills before the kernel in front
// has ended (no kernel writes weights). Once a warp has no more to fetch the next kernel may start. A row's
// sum is that of a warp's slices in their order, then of the warps in one order; both depend on the layer
// alone.
#pragma once

#include "byte_mma.cuh"
#include "bytes_inputs.cuh"
#include "bytes_outputs.cuh"

namespace ortolan::cuda {

__device__ __forceinline__ void copy_word(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(shared), "l"(global) : "memory");
}
// A warp's units, as it fetches or multiplies them: slice after slice of a tile, tile after tile of the team.
struct ByteCursor {
  int tile;  // of the block
  int slice;

  // Whether the tile has changed.
  __device__ __forceinline__ bool advance(const BytePlan& plan, int first_slice) {
    slice += plan.span;
    if (slice < plan.slices) return false;
    slice = first_slice;
    tile += plan.teams;
    return true;
  }
};

// Fetches a warp's units into its ring.
template <LowBitFormat kFormat, bool kZeros>
struct ByteFetcher {
  using Layout = ByteLayout<static_cast<int>(code_bits(kFormat)), kZeros>;
  const ByteStreamParams& p;
  ByteCursor at;
  int first_slice, tiles;        // the warp's, and the block's
  uint32_t target, word_target;  // of the lane, in the first stage
  const uint8_t* codes;          // of the lane's first line and bytes, in the tile's first slice
  const uint8_t* words;          // of its line's scales or zero points
  int word_step;                 // bytes from there to those of the next tile
  int outputs;                   // from the tile's first one to the layer's last

  __device__ __forceinline__ ByteFetcher(const ByteStreamParams& p, uint32_t ring, const ByteCursor& first,
                                         int tiles)
      : p(p), at(first), first_slice(first.slice), tiles(tiles) {
    const int lane = threadIdx.x % 32, line = lane % 16;
    const bool gated = p.linear.activation != GatedActivation::kNone;
    const int output =
        (at.tile * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * tile_outputs(p);
    target = ring + lane / 8 * 128 + (lane % 8 ^ (lane / 8 & 1) * 4) * 16;
    word_target = ring + BytePlan::kCodesBytes + lane * 4;
    codes = p.weight.codes + (int64_t{output} + lane / 8) * p.plan.row_bytes + lane % 8 * 16;
    outputs = static_cast<int>(p.linear.num_outputs) - output;
    const int64_t row = output + (gated ? line % 8 + (line >= 8 ? p.linear.num_outputs : 0) : line);
    const int row_bytes = lane < 16 ? 2 * p.plan.groups : p.plan.zero_row_bytes;
    words =
        (lane < 16 ? static_cast<const uint8_t*>(p.weight.scales) : p.weight.zero_points) + row * row_bytes;
    word_step = p.plan.tile_step * row_bytes;
  }
  __device__ __forceinline__ bool done() const { return at.tile >= tiles; }
  // Scales and zero points of the lane's line, where it has one.
  __device__ __forceinline__ void fetch_word(int stage) const {
    const int lane = threadIdx.x % 32, group = p.plan.first_group(at.slice);
    const int byte = lane < 16 ? 2 * group : kFormat == LowBitFormat::kInt4 ? group / 2 : group;
    if (lane < (kZeros ? 32 : 16) && (p.plan.later_lines ? lane % 16 : lane % 8) < outputs)
      copy_word(word_target + stage,
                reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(words + byte) & ~uintptr_t{3}));
  }
  __device__ __forceinline__ void fetch(int place) {
    if (!done()) {
      const int stage = place * Layout::kStageBytes, four = 4 * p.plan.row_bytes;
      const uint8_t* source = codes + at.slice * BytePlan::kRowBytes;
      const uint8_t* later = source + p.plan.later_bytes;
      if (at.slice < p.plan.whole_slices && outputs >= 8 + p.plan.later_lines) {
        const uint64_t policy = evict_first_policy();  // a step reads each weight once
        copy_async_16_at<0, 0>(target + stage, source, policy);
        copy_async_16_at<512, 0>(target + stage, source + four, policy);
        copy_async_16_at<1024, 0>(target + stage, later, policy);
        copy_async_16_at<1536, 0>(target + stage, later + four, policy);
      } else {
        const int lane = threadIdx.x % 32, column = at.slice * BytePlan::kRowBytes + lane % 8 * 16;
        const int lines = column < p.plan.row_bytes ? outputs - lane / 8 : 0;
        copy_async_16(target + stage, source, lines > 0);
        copy_async_16(target + stage + 512, source + four, lines > 4);
        copy_async_16(target + stage + 1024, later, lines > p.plan.later_lines);
        copy_async_16(target + stage + 1536, later + four, lines > 4 + p.plan.later_lines);
      }
      fetch_word(stage);
      if (at.advance(p.plan, first_slice)) {
        codes += p.plan.tile_bytes;
        words += word_step;
        outputs -= p.plan.tile_step;
      }
    }
    copy_async_commit();
  }
};

// Products of a tile over a warp's slices. Lane 4 g + t has the sums of lines g and g + 8 for token t of each
// four.
template <typename Element, LowBitFormat kFormat, bool kZeros, int kTokenTiles>
struct ByteProducts {
  static constexpr bool kNibbles = kFormat == LowBitFormat::kInt4;
  static constexpr int kBlocks = kNibbles ? 2 : 1;  // of 128 columns, in a slice
  using Slice = ByteSlice<static_cast<int>(code_bits(kFormat))>;
  const ByteStreamParams& p;
  uint32_t inputs[kTokenTiles];  // the lane's, of its token; of another one where there is none
  const ByteFacts* facts[kTokenTiles];
  uint32_t codes;                           // where the lane's codes lie in a stage
  uint32_t scale_parity[2], zero_place[2];  // of the lane's lines' first scale and zero point
  float sums[kTokenTiles][2];

  __device__ __forceinline__ void prepare(uint32_t first_input, const ByteFacts* first_facts) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, last = p.pass.num_tokens - 1;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      inputs[tile] =
          first_input + min(g / 2 + 4 * tile, last) * Slice::kBytes + g % 2 * (Slice::kColumns + 64) + t * 16;
      facts[tile] = first_facts + min(t + 4 * tile, last);
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
  // The words that the lane's lines' scales lie in, and the one of block n of the slice.
  __device__ __forceinline__ uint32_t scale_word(uint32_t stage, int half, int group) const {
    const int line = threadIdx.x % 32 / 4 + 8 * half;
    const uint32_t word = load_shared_word(stage + BytePlan::kCodesBytes + line * 4);
    return p.plan.paired ? word : __byte_perm(word, 0, (scale_parity[half] + group & 1) ? 0x3232 : 0x1010);
  }
  static __device__ __forceinline__ float scale_of(uint32_t word, int n) {
    const float2 scales = Half<Element>::unpack(word);
    return n ? scales.y : scales.x;
  }
  // Adds what 128 columns' sums are worth: of high and low bytes, of the first line and the second.
  __device__ __forceinline__ void fold(int tile, const int (&parts)[4], const float (&scales)[2],
                                       const int (&zeros)[2], float unit, int sum) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int number = parts[2 * half] * 256 + parts[2 * half + 1] - zeros[half] * sum;
      sums[tile][half] = fmaf(static_cast<float>(number), scales[half] * unit, sums[tile][half]);
    }
  }
  // Of 16 bytes of codes of both lines: the products of 128 columns of int4, or 64 of int8. `x`: the lane's
  // bytes of them.
  __device__ __forceinline__ void multiply_chunk(int (&parts)[4], const uint4& upper, const uint4& lower,
                                                 uint32_t x) const {
    const uint32_t lines[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
    int even[4] = {}, odd[4] = {};
    uint4 int8_inputs;
    if constexpr (!kNibbles) int8_inputs = load_shared_16(x);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t a[] = {lines[0][2 * n], lines[1][2 * n], lines[0][2 * n + 1], lines[1][2 * n + 1]};
      if constexpr (kNibbles) {
        const uint4 b = load_shared_16(x ^ n * 64);
        uint32_t low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] = a[i] & 0x0F0F0F0Fu, high[i] = a[i] & 0xF0F0F0F0u;
        multiply_bytes(even, low, b.x, b.y);
        multiply_bytes(odd, high, b.z, b.w);
      } else {
        multiply_bytes(parts, a, n ? int8_inputs.z : int8_inputs.x, n ? int8_inputs.w : int8_inputs.y);
      }
    }
    if constexpr (kNibbles)
#pragma unroll
      for (int i = 0; i < 4; ++i) parts[i] = even[i] * 16 + odd[i];
  }
  // `place`: of the slice's first token among the warp's inputs.
  __device__ __forceinline__ void multiply(uint32_t stage, int slice, int place) {
    const int group = p.plan.first_group(slice);
    uint4 upper[2], lower[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      upper[n] = load_shared_16(stage + (codes ^ n * 64));
      lower[n] = load_shared_16(stage + (codes ^ n * 64) + 1024);
    }
    const uint32_t words[] = {scale_word(stage, 0, group), scale_word(stage, 1, group)};
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const ByteFacts fact = facts[tile][place];
      const uint32_t x = inputs[tile] + place * Slice::kBytes;
      int parts[kBlocks][4] = {};
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) multiply_chunk(parts[n], upper[n], lower[n], x + n * 128);
      if constexpr (!kNibbles) multiply_chunk(parts[0], upper[1], lower[1], x ^ 64);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const float scales[] = {scale_of(words[0], n), scale_of(words[1], n)};
        const int zero_group = p.plan.paired ? group + n : group;
        const int zeros[] = {zero_of(stage, 0, zero_group), zero_of(stage, 1, zero_group)};
        fold(tile, parts[n], scales, zeros, fact.unit, fact.sums[n]);
      }
    }
  }
  __device__ __forceinline__ void start() {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) sums[tile][0] = sums[tile][1] = 0;
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

template <typename Element, LowBitFormat kFormat, bool kZeros, int kTokenTiles>
__global__ void __launch_bounds__(BytePlan::kMostThreads, 2)
    low_bit_bytes_kernel(const __grid_constant__ ByteStreamParams p) {
  constexpr int kBits = static_cast<int>(code_bits(kFormat));
  using Layout = ByteLayout<kBits, kZeros>;
  extern __shared__ __align__(128) unsigned char byte_memory[];
  const BytePlan& plan = p.plan;
  const int warp = threadIdx.x / 32, member = warp % plan.span, tokens = p.pass.num_tokens;
  const int tiles = (plan.tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                    static_cast<int>(gridDim.x);
  const Layout layout(plan, tokens);
  const int slices = warp * plan.rounds * tokens;  // in front of the warp's own
  const uint32_t ring = shared_address(byte_memory) + warp * plan.depth * Layout::kStageBytes;
  const uint32_t inputs = shared_address(byte_memory) + layout.inputs + slices * ByteSlice<kBits>::kBytes;
  auto* facts = reinterpret_cast<ByteFacts*>(byte_memory + layout.facts) + slices;
  auto* squares = reinterpret_cast<float*>(byte_memory + layout.squares);
  auto* parts = reinterpret_cast<float*>(byte_memory + layout.parts);

  ByteCursor at{warp / plan.span, member};
  ByteFetcher<kFormat, kZeros> fetcher(p, ring, at, tiles);
#pragma unroll 1
  for (int n = 0; n < plan.depth; ++n) fetcher.fetch(n);
  const int rounds = (plan.slices - member + plan.span - 1) / plan.span;
  const ByteInputLoader<Element, kBits, true> with_norm{p,      inputs, facts, squares + warp * tokens,
                                                        member, rounds};
  if (p.linear.norm_weight) with_norm.prefetch_norm();
  wait_for_previous_kernel();
  // Not before: what the kernel in front still reads would have to wait for two layers' weights.
  if (fetcher.done()) launch_dependents();
  if (p.linear.norm_weight)
    with_norm.run();
  else
    ByteInputLoader<Element, kBits, false>{p, inputs, facts, squares, member, rounds}.run();

  ByteOutputs<Element> outputs{p, squares};
  ByteProducts<Element, kFormat, kZeros, kTokenTiles> products{p};
  products.prepare(inputs, facts);
  int place = 0, turn_parts = plan.turn_parts(tokens);  // from this turn's to the next one's
#pragma unroll 1
  for (int first = 0; first < tiles; first += plan.turn_tiles) {
    const int end = min(first + plan.turn_tiles, tiles);
    while (at.tile < end) {
      float* target = parts + ((at.tile - first) * plan.span + member) * tokens * BytePlan::kLines;
      int input = 0;
      bool more = true;
      products.start();
#pragma unroll 1
      for (; more; input += tokens) {
        wait_for_oldest(plan.depth);
        __syncwarp();
        products.multiply(ring + place * Layout::kStageBytes, at.slice, input);
        __syncwarp();
        if (!fetcher.done()) {
          fetcher.fetch(place);
          if (fetcher.done()) launch_dependents();
        } else {
          copy_async_commit();
        }
        if (++place == plan.depth) place = 0;
        more = !at.advance(plan, member);
      }
      products.store(target);
    }
    outputs.prepare(first, end - first);
    __syncthreads();
    outputs.finish(parts, first, end - first);
    parts += turn_parts;
    turn_parts = -turn_parts;
  }
}

}  // namespace ortolan::cuda
