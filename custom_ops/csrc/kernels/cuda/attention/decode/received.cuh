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

// A thread has one column of four rows, and its three neighbours have the next ones: leaves it four columns
// of row lane % 4.
__device__ __forceinline__ float4 transpose_quad(const float4& column) {
  const int lane = threadIdx.x;
  const bool odd = lane & 1, high = lane & 2;
  const float even_row = __shfl_xor_sync(~0u, odd ? column.x : column.y, 1);
  const float odd_row = __shfl_xor_sync(~0u, odd ? column.z : column.w, 1);
  // Rows lane % 2 and + 2, of columns lane / 2 % 2 * 2 and + 1.
  const float2 first = odd ? make_float2(even_row, column.y) : make_float2(column.x, even_row);
  const float2 second = odd ? make_float2(odd_row, column.w) : make_float2(column.z, odd_row);
  const float2 given = high ? first : second, own = high ? second : first;
  const float2 other{__shfl_xor_sync(~0u, given.x, 2), __shfl_xor_sync(~0u, given.y, 2)};
  return high ? float4{other.x, other.y, own.x, own.y} : float4{own.x, own.y, other.x, other.y};
}

}  // namespace ortolan::cuda
