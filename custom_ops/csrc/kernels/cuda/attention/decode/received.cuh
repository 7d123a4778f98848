// Partial sums that the blocks of a cluster send to the one that merges them, into its shared memory.
//
// So sums need not travel through global memory, nor blocks meet before they merge. Values and their order
// are those of plan.cuh: only the place differs. Sums are sent tile by tile.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "plan.cuh"

namespace ortolan::cuda {

// Of a block's piece, at most, where sums are received in the last stage: so many tiles leave it free.
constexpr int kSentTiles = 2;

// What the blocks of a cluster merge: units, some columns of a row each, which they take in turns.
struct ClusterUnits {
  PowerOfTwo columns;  // of a unit
  PowerOfTwo groups;   // of a row's columns
  int count;           // units
  int turns;           // units of a block, at most

  static constexpr PowerOfTwo kFine{5};  // columns, where there are blocks for as many units

  template <int kHeadSize>
  static ORTOLAN_HOST_DEVICE int most(int rows) {
    return rows * (kHeadSize >> kFine.shift);
  }
  template <int kHeadSize>
  static ORTOLAN_HOST_DEVICE ClusterUnits of(int rows, int cluster, const Divisor& by_cluster) {
    constexpr PowerOfTwo kWide{kHeadSize < 128 ? 6 : 7};
    constexpr int kShift = kHeadSize == 64 ? 6 : kHeadSize == 128 ? 7 : 8;
    static_assert(1 << kShift == kHeadSize);
    ClusterUnits units{};
    units.columns = most<kHeadSize>(rows) <= cluster ? kFine : kWide;
    units.groups.shift = kShift - units.columns.shift;
    units.count = rows << units.groups.shift;
    units.turns = by_cluster.divide(units.count + cluster - 1);
    return units;
  }
};

// Where a block receives sums: states [tiles, turns], then sums [tiles, turns, columns].
struct ReceivedSums {
  uint32_t states;
  uint32_t sums;
  int turns;
  PowerOfTwo columns;

  // `most`: tiles that are sent.
  static __device__ __forceinline__ ReceivedSums of(uint32_t memory, const ClusterUnits& units, int most) {
    const int states = (most * units.turns * static_cast<int>(sizeof(SoftmaxState)) + 15) / 16 * 16;
    return {memory, memory + states, units.turns, units.columns};
  }
  static ORTOLAN_HOST_DEVICE int unit_bytes(PowerOfTwo columns) {
    return static_cast<int>(sizeof(SoftmaxState)) + (static_cast<int>(sizeof(float)) << columns.shift);
  }
  static int bytes(const ClusterUnits& units, int most) {
    return most * units.turns * unit_bytes(units.columns) + 16;
  }
  __device__ __forceinline__ uint32_t state(int tile, int turn) const {
    return states + (tile * turns + turn) * static_cast<int>(sizeof(SoftmaxState));
  }
  __device__ __forceinline__ uint32_t sum(int tile, int turn, int column) const {
    return sums + (((tile * turns + turn) << columns.shift) + column) * static_cast<int>(sizeof(float));
  }
};

// What a block receives of one unit, for a thread of it: four columns.
struct ReceivedUnit {
  ReceivedSums all;
  int turn;
  int column;

  __device__ __forceinline__ SoftmaxState state(int tile) const {
    const float2 state = load_shared_pair(all.state(tile, turn));
    return {state.x, state.y};
  }
  __device__ __forceinline__ uint32_t sum(int tile) const { return all.sum(tile, turn, column); }
};

}  // namespace ortolan::cuda
