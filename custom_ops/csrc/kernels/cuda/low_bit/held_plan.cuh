// How held.cuh shares its work.
#pragma once

#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/linear/gemv.cuh"
#include "kernels/low_bit_params.h"

namespace ortolan::cuda {

// Units of 16 lines of weights by 128 bytes of codes. A warp has 256 columns, of one unit or of two.
struct HeldPlan {
  static constexpr int kLines = 16;
  static constexpr int kRowBytes = 128;  // of codes, in a unit
  static constexpr int kCodesBytes = kLines * kRowBytes;
  static constexpr int kWarpColumns = 256;
  static constexpr int kTokens = 16;
  static constexpr int kTokenStride = 20;  // of sums: what lanes store at once lies in different banks
  static constexpr int kSums = kTokens * kTokenStride;  // a warp's of a tile
  // Warps that multiply, one that loads, and those that finish outputs.
  static constexpr int kMostWarps = 16, kFinishers = 3;
  static constexpr int kThreads = 32 * (kMostWarps + 1 + kFinishers);
  static constexpr int kMostStages = 4;
  static constexpr int kGathered = 3;  // turns whose sums a block of a cluster holds: see HeldOutputs

  int tiles;              // of 16 lines
  int units;              // of a line
  int row_bytes;          // of codes
  int scale_row_bytes;    // of scales
  int zero_row_bytes;     // of zero points
  int scale_rows_shift;   // rows that share a row of scales, a power of two
  int step_groups;        // groups that half a unit holds, or 1
  int group_steps_shift;  // halves of units that share a group, a power of two
  int scale_bytes;        // of a stage's line of scales, in shared memory
  int zero_bytes;         // and of zero points
  int line_bytes;         // of both: lines lie in different banks
  int copy_bytes;         // 4 or 16, in which they are copied
  int cluster;            // blocks that share a tile's columns
  int clusters;           // which take tiles in turn
  int span;               // warps that share a tile
  int teams;              // of so many warps, each at a tile of its own
  int stages;             // a unit of each warp, whose columns adjoin; on their way
  bool gated;             // a tile is the gates and factors of 8 outputs
  float input_share;      // 1 / K
  bool wide_outputs;      // and residuals: begin at multiples of four elements in each row

  __host__ __device__ int warps() const { return span * teams; }
  // Of 32 lanes' four lines, of a turn.
  __device__ __forceinline__ int turn_pieces() const { return teams * kLines * kTokens / 128; }
  __host__ __device__ int words_bytes() const { return teams * kLines * line_bytes; }  // of a stage
  // Of a block's unit number `unit` of a warp: the one of its first warp.
  __device__ __forceinline__ int first_unit(int rank, int warp_units, int unit) const {
    return (rank * warp_units + unit) * span;
  }
  // Tiles from one of a team to its next one.
  __host__ __device__ int stride() const { return clusters * teams; }
  __device__ __forceinline__ int outputs() const { return gated ? 8 : 16; }  // of a tile
  // The first group of half a unit, in its line.
  __device__ __forceinline__ int group_of(int step) const {
    return (step >> group_steps_shift) * step_groups;
  }
};

struct HeldParams {
  FusedLinearParams linear;
  LowBitWeight weight;
  HeldPlan plan;
  GemvPass pass;
  CUtensorMap codes;  // [1 or 2, N, row of 16-bit words], boxes of a unit
};

// Where all of it lies in shared memory: stages of codes and of scales and zero points, sums of two turns
// [warp, token, line], in clusters those of blocks, sums of squares [warp, token], the norm's
// factors [finisher, token], and barriers.
struct HeldLayout {
  int words, sums, block_sums, squares, factors, barriers, bytes;

  __host__ __device__ explicit HeldLayout(const HeldPlan& plan) {
    constexpr int kSumsBytes = HeldPlan::kSums * 4;
    const int warps = plan.warps(), units = warps * plan.stages;
    words = units * HeldPlan::kCodesBytes;
    sums = words + plan.stages * plan.words_bytes();
    block_sums = sums + 2 * warps * kSumsBytes;
    squares = block_sums + (plan.cluster > 1 ? HeldPlan::kGathered * plan.cluster * kSumsBytes : 0);
    factors = squares + plan.cluster * plan.span * HeldPlan::kTokens * 4;
    barriers = factors + HeldPlan::kFinishers * HeldPlan::kTokens * 4;
    bytes = barriers + 256;
  }
};

struct HeldBarriers {
  Barrier full[HeldPlan::kMostStages], empty[HeldPlan::kMostStages];  // of stages
  Barrier summed[2], finished[2];                                     // of turns' sums
  Barrier gathered[HeldPlan::kGathered];                              // the cluster's sums of a turn
  Barrier squared;                                                    // sums of squares
};

}  // namespace ortolan::cuda
