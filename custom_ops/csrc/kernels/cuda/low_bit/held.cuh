// Products of 9 to 16 tokens of 16-bit elements with low-bit weights on sm_90.
//
// The inputs stay in registers: a warp has 256 columns of all tokens, and meets no others. Where 16 warps are
// too few for a line, the blocks of a cluster share it. Weights stream through shared memory once, as they
// lie in memory, in units of 16 lines by 128 bytes of codes, in a gated layer the gates and factors of 8
// outputs. One warp loads them, from before the kernel in front has ended (no kernel writes weights); up to
// 16 expand codes and multiply 16 lines by 16 tokens on tensor cores, a group's sum scaled in float32; three
// make outputs of their sums. A line's sum is that of the warps in their order, in each block for itself,
// then of the blocks; both depend on the layer alone.
#pragma once

#include "held_inputs.cuh"
#include "held_outputs.cuh"
#include "stream.cuh"

namespace ortolan::cuda {

__device__ __forceinline__ uint32_t load_shared_half(uint32_t address) {
  uint16_t bits;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(bits) : "r"(address) : "memory");
  return bits;
}
__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
  uint32_t byte;
  asm volatile("ld.shared.u8 %0, [%1];\n" : "=r"(byte) : "r"(address) : "memory");
  return byte;
}

// What the loading warp does: a stage has a unit of each multiplying warp, and of their lines the scales and
// zero points.
template <typename Kind, int kUnits>
struct HeldLoader {
  const HeldParams& p;
  HeldBarriers& barriers;
  uint32_t codes, words;  // of the first stage
  int rank;

  // Bytes of a row from byte `first` on, by two lanes; zeros beyond the row.
  template <int kBytes>
  static __device__ __forceinline__ void copy_row(uint32_t target, const uint8_t* row, int first,
                                                  int row_bytes, int bytes) {
    const int within = static_cast<int>(reinterpret_cast<uintptr_t>(row + first) & kBytes - 1);
    const uint8_t* source = row + first - within;
#pragma unroll 4
    for (int byte = threadIdx.x % 2 * kBytes; byte < bytes; byte += 2 * kBytes) {
      const bool exists = first - within + byte < row_bytes;
      if constexpr (kBytes == 16)
        copy_async_16(target + byte, source + (exists ? byte : 0), exists);
      else
        copy_async_4(target + byte, source + (exists ? byte : 0), exists);
    }
  }
  // Of the stage's units from `first_unit` on.
  template <int kBytes>
  __device__ __forceinline__ void copy_words(uint32_t target, int first_tile, int first_unit) const {
    const HeldPlan& plan = p.plan;
    const int line = threadIdx.x % 32 / 2, group = plan.group_of(2 * first_unit);
    const auto outputs = static_cast<int>(p.linear.num_outputs);
#pragma unroll 1
    for (int team = 0; team < plan.teams; ++team) {
      const int output = (first_tile + team) * plan.outputs() + (plan.gated ? line % 8 : line);
      if (output >= outputs) continue;
      const int row = output + (plan.gated && line >= 8 ? outputs : 0);
      const uint32_t place = target + (team * HeldPlan::kLines + line) * plan.line_bytes;
      copy_row<kBytes>(place,
                       Kind::scales(p.weight) + int64_t{row >> plan.scale_rows_shift} * plan.scale_row_bytes,
                       Kind::scale_byte(group), plan.scale_row_bytes, plan.scale_bytes);
      if constexpr (Kind::kZeros)
        copy_row<kBytes>(place + plan.scale_bytes, p.weight.zero_points + int64_t{row} * plan.zero_row_bytes,
                         Kind::zero_byte(group), plan.zero_row_bytes, plan.zero_bytes);
    }
  }
  __device__ __forceinline__ void run(int first_tile) const {
    const HeldPlan& plan = p.plan;
    const int warp = threadIdx.x % 32, team = warp / plan.span, member = warp % plan.span;
    RingPlace at;
#pragma unroll 1
    for (; first_tile < plan.tiles; first_tile += plan.stride())
#pragma unroll 1
      for (int unit = 0; unit < kUnits; ++unit) {
        Barrier& full = barriers.full[at.place];
        const int first_unit = plan.first_unit(rank, kUnits, unit), number = first_unit + member;
        barriers.empty[at.place].wait(at.parity ^ 1);
        const bool exists = warp < plan.warps() && first_tile + team < plan.tiles && number < plan.units;
        const int boxes = __popc(__ballot_sync(~0u, exists));
        if (warp == 0) full.arrive_expecting(boxes * HeldPlan::kCodesBytes);
        __syncwarp();
        if (exists)
          copy_box(codes + (at.place * plan.warps() + warp) * HeldPlan::kCodesBytes, p.codes,
                   number * HeldPlan::kRowBytes / 2, (first_tile + team) * plan.outputs(), 0, full,
                   evict_first_policy());
        const uint32_t target = words + at.place * plan.words_bytes();
        if (plan.copy_bytes == 16)
          copy_words<16>(target, first_tile, first_unit);
        else
          copy_words<4>(target, first_tile, first_unit);
        full.arrive_after_copies();
        at.advance(plan.stages);
      }
    launch_dependents();
  }
};

// Products of a tile with a warp's inputs. Lane 4 g + t has the sums of lines g and g + 8 for tokens 2 t and
// 2 t + 1 of each eight.
template <typename Kind>
struct HeldProducts {
  static constexpr LowBitFormat kFormat = Kind::kFormat;
  using Element = typename Kind::Element;
  using Format = typename Kind::Format;
  using Inputs = HeldInputs<Element, kFormat>;
  static constexpr int kTokenTiles = Inputs::kTokenTiles;
  using Sums = float[kTokenTiles][4];
  static constexpr bool kScaledPairs = kFormat == LowBitFormat::kNvfp4;  // not sums
  static constexpr bool kOwnGroups = Kind::kShort && !kScaledPairs;      // a piece may have its own group
  static constexpr int kUnitPieces = Inputs::kUnitPieces, kUnits = Inputs::kUnits;
  const HeldParams& p;
  const Inputs& inputs;
  Sums sums;
  uint32_t scale_places[2], zero_places[2];  // the low bits of the addresses of the lane's lines' rows

  __device__ __forceinline__ void start(int tile) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < 4 * kTokenTiles; ++n) sums[n / 4][n % 4] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = p.plan.gated ? tile * 8 + g + half * static_cast<int>(p.linear.num_outputs)
                                   : tile * 16 + g + 8 * half;
      scale_places[half] = (row >> p.plan.scale_rows_shift) * p.plan.scale_row_bytes;
      if (Kind::kZeros) zero_places[half] = row * p.plan.zero_row_bytes;
    }
  }
  // Groups of a stage: its first one, and the unit's.
  struct Groups {
    int stage, unit;
  };
  // Of the lane's line of a half of them, where a stage's words of the team are `words`.
  __device__ __forceinline__ uint32_t line(uint32_t words, int half) const {
    return words + (threadIdx.x % 32 / 4) * p.plan.line_bytes + half * 8 * p.plan.line_bytes;
  }
  // Of group `n` from the unit's first one on.
  __device__ __forceinline__ uint32_t scale_place(uint32_t words, int half, const Groups& groups,
                                                  int n) const {
    const int first = Kind::scale_byte(groups.stage);
    return line(words, half) + (scale_places[half] + first & 3) + Kind::scale_byte(groups.unit + n) - first;
  }
  __device__ __forceinline__ float scale(uint32_t words, int half, const Groups& groups, int n) const {
    if constexpr (kScaledPairs) return 1;
    const uint32_t place = scale_place(words, half, groups, n);
    if constexpr (kFormat == LowBitFormat::kFp8) return __uint_as_float(load_shared_word(place));
    if constexpr (kFormat == LowBitFormat::kMxfp4) return e8m0_value(load_shared_byte(place));
    return Half<Element>::unpack(load_shared_half(place)).x;
  }
  // What Codes::expand subtracts.
  __device__ __forceinline__ uint32_t offset(uint32_t words, int half, const Groups& groups, int n) const {
    constexpr bool kNibbles = kFormat == LowBitFormat::kInt4;
    if constexpr (!Format::kInteger) return 0;
    if constexpr (!Kind::kZeros) return Format::offset_of(kNibbles ? 8 : 128);
    const int first = Kind::zero_byte(groups.stage), group = groups.unit + n;
    const uint32_t code = load_shared_byte(line(words, half) + p.plan.scale_bytes +
                                           (zero_places[half] + first & 3) + Kind::zero_byte(group) - first);
    return Format::offset_of(kNibbles ? code >> group % 2 * 4 & 15 : code);
  }
  __device__ __forceinline__ void add(const Sums& group_sums, const float (&scales)[2]) {
#pragma unroll
    for (int i = 0; i < 4 * kTokenTiles; ++i)
      sums[i / 4][i % 4] = fmaf(group_sums[i / 4][i % 4], scales[i % 4 / 2], sums[i / 4][i % 4]);
  }
  // A word of codes of each of the lane's lines, and what expand needs beside them.
  struct Piece {
    uint32_t words[2], offsets[2];
  };
  // `place`: of the lane's first piece.
  __device__ __forceinline__ void load(Piece& loaded, uint32_t place, uint32_t words, const Groups& groups,
                                       int piece) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      loaded.words[half] = load_shared_word((place ^ piece * 16) + half * 1024);
      if constexpr (kScaledPairs)
        loaded.offsets[half] = Format::offset_of(load_shared_byte(
            scale_place(words, half, groups, 2 * piece + static_cast<int>(threadIdx.x) % 4 / 2)));
    }
  }
  __device__ __forceinline__ void multiply_piece(Sums& group_sums, const Piece& loaded, int piece) const {
    uint32_t pairs[2][Format::kPairs];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      Format::expand(loaded.words[half], loaded.offsets[half], pairs[half]);
    inputs.multiply(group_sums, pairs[0], pairs[1], piece);
  }
  // A unit: `codes`, `words` of the stage and team, and its number in the line; the warp's unit `kUnit`.
  template <int kUnit>
  __device__ __forceinline__ void multiply(uint32_t codes, uint32_t words, int number, int first_unit) {
    constexpr int kAhead = 3;  // pieces
    const int lane = threadIdx.x % 32, g = lane / 4;
    const Groups groups{p.plan.group_of(2 * first_unit), p.plan.group_of(2 * number)};
    const int second = kScaledPairs ? 0 : p.plan.group_of(2 * number + 1) - groups.unit;
    const uint32_t place = codes + g * HeldPlan::kRowBytes + g * 16 + lane % 4 * 4;
    // Pieces of both halves in turn: tensor cores wait for neither sum.
    const auto piece_of = [](int n) { return kOwnGroups ? n : n % 2 * (kUnitPieces / 2) + n / 2; };
    const auto group_of = [&](int n) {
      return !kOwnGroups ? n % 2 * second : kFormat == LowBitFormat::kMxfp4 ? n : n * p.plan.step_groups / 4;
    };
    Piece pieces[kUnitPieces];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(pieces[n], place, words, groups, piece_of(n));
    constexpr int kSums = 2;
    Sums group_sums[kSums] = {};
    float scales[kSums][2];
    uint32_t offsets[kSums][2];
    const auto load_group = [&](int n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scales[n % kSums][half] = scale(words, half, groups, group_of(n));
        offsets[n % kSums][half] = offset(words, half, groups, group_of(n));
      }
    };
    load_group(0);
    load_group(1);
#pragma unroll
    for (int n = 0; n < kUnitPieces; ++n) {
      if (n + kAhead < kUnitPieces) load(pieces[n + kAhead], place, words, groups, piece_of(n + kAhead));
      if constexpr (!kScaledPairs)
        pieces[n].offsets[0] = offsets[n % 2][0], pieces[n].offsets[1] = offsets[n % 2][1];
      multiply_piece(group_sums[n % 2], pieces[n], kUnit * kUnitPieces + piece_of(n));
      if (!kOwnGroups && n < kUnitPieces - 2) continue;
      add(group_sums[n % 2], scales[n % 2]);
      if (n + 2 < kUnitPieces) {
        load_group(n + 2);
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; ++i) group_sums[n % 2][i / 4][i % 4] = 0;
      }
    }
  }
  // To `target` [tokens, lines].
  __device__ __forceinline__ void store(float* target) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* from = target + 2 * t * HeldPlan::kTokenStride + g;
#pragma unroll
    for (int i = 0; i < 4 * kTokenTiles; ++i)
      from[(8 * (i / 4) + i % 2) * HeldPlan::kTokenStride + i % 4 / 2 * 8] = sums[i / 4][i % 4];
  }
};

template <typename Kind>
__global__ void __launch_bounds__(HeldPlan::kThreads, 1)
    low_bit_held_kernel(const __grid_constant__ HeldParams p) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  // Together what the block is launched with.
  constexpr int kComputeRegisters = 104, kOtherRegisters = 64;
  using Products = HeldProducts<Kind>;
  constexpr int kUnits = Products::kUnits;
  extern __shared__ __align__(1024) unsigned char held_memory[];
  const HeldPlan& plan = p.plan;
  const HeldLayout layout(plan);
  auto& barriers = *reinterpret_cast<HeldBarriers*>(held_memory + layout.barriers);
  auto* sums = reinterpret_cast<float*>(held_memory + layout.sums);
  auto* squares = reinterpret_cast<float*>(held_memory + layout.squares);
  const uint32_t codes = shared_address(held_memory), words = codes + layout.words;
  constexpr int kCopies = 1 + 32;  // a stage's: of codes, and of scales by the lanes
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), warps = plan.warps();
  const int rank = plan.cluster == 1 ? 0 : cluster_rank();
  const int first_tile = static_cast<int>(blockIdx.x) / plan.cluster * plan.teams;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < plan.stages; ++stage) {
      barriers.full[stage].init(kCopies);
      barriers.empty[stage].init(warps);
    }
    for (int turn = 0; turn < 2; ++turn) {
      barriers.summed[turn].init(warps);
      barriers.finished[turn].init(plan.turn_pieces());
    }
    for (Barrier& gathered : barriers.gathered) gathered.init(plan.turn_pieces());
    barriers.squared.init(plan.cluster == 1 ? plan.span : 1);
    if (p.linear.norm_weight && plan.cluster > 1)
      barriers.squared.arrive_expecting(plan.cluster * plan.span * HeldPlan::kTokens * 4);
    fence_barriers();
  }
  __syncthreads();
  if (plan.cluster > 1) cluster_arrive();
  // All blocks of the cluster have begun: their shared memory can be written.
  const auto wait_for_blocks = [&] {
    if (plan.cluster > 1) cluster_wait();
  };
  if (warp == HeldPlan::kMostWarps) {
    lower_registers<kOtherRegisters>();
    wait_for_blocks();
    HeldLoader<Kind, kUnits>{p, barriers, codes, words, rank}.run(first_tile);
  } else if (warp > HeldPlan::kMostWarps) {
    lower_registers<kOtherRegisters>();
    wait_for_blocks();
    const int finisher = warp - HeldPlan::kMostWarps - 1;
    auto* block_sums = reinterpret_cast<float*>(held_memory + layout.block_sums);
    auto* factors = reinterpret_cast<float*>(held_memory + layout.factors) + finisher * HeldPlan::kTokens;
    const HeldOutputs<typename Kind::Element, Kind::kFormat> outputs{p,       barriers, sums, block_sums,
                                                                     squares, factors,  rank};
    outputs.run(first_tile, finisher);
  } else {
    raise_registers<kComputeRegisters>();
    const int member = warp % plan.span, team = warp / plan.span;
    typename Products::Inputs inputs{p, plan.first_unit(rank, kUnits, 0) + member, plan.span};
    typename Products::Inputs::NormWeights norm;
    inputs.load_norm(norm);
    wait_for_previous_kernel();
    inputs.load();
    wait_for_blocks();
    if (p.linear.norm_weight) {
      if (warp < plan.span)
        inputs.share_squares(squares + (rank * plan.span + member) * HeldPlan::kTokens, barriers.squared);
      if constexpr (Products::Inputs::kFactorLater) {
        inputs.weigh(norm);
      } else {
        wait_for_cluster(barriers.squared, 0);
        inputs.normalise(norm, squares);
      }
    }
    inputs.arrange();
    Products products{p, inputs};
    RingPlace at, turn;
#pragma unroll 1
    for (int tile = first_tile + team, turn_tile = first_tile; warp < warps && turn_tile < plan.tiles;
         tile += plan.stride(), turn_tile += plan.stride()) {
      products.start(tile);
      const auto multiply = [&]<int kUnit>() {
        barriers.full[at.place].wait(at.parity);
        const int first_unit = plan.first_unit(rank, kUnits, kUnit);
        if (first_unit + member < plan.units)
          products.template multiply<kUnit>(
              codes + (at.place * warps + warp) * HeldPlan::kCodesBytes,
              words + (at.place * plan.teams + team) * HeldPlan::kLines * plan.line_bytes,
              first_unit + member, first_unit);
        barriers.empty[at.place].arrive_once(threadIdx.x % 32);
        at.advance(plan.stages);
      };
      multiply.template operator()<0>();
      if constexpr (kUnits == 2) multiply.template operator()<1>();
      barriers.finished[turn.place].wait(turn.parity ^ 1);
      products.store(sums + (turn.place * warps + warp) * HeldPlan::kSums);
      barriers.summed[turn.place].arrive_once(threadIdx.x % 32);
      turn.advance(2);
    }
  }
#else
  refuse_architecture();
#endif
}

}  // namespace ortolan::cuda
