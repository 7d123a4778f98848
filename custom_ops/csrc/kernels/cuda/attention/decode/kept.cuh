// Partial sums that the blocks of a cluster keep in their own shared memory, where the others read them.
//
// So it is where no block has more than kKeptTiles tiles: they leave the last stage free, and sums need not
// travel through global memory. Values and their order are those of plan.cuh: only the place differs.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "plan.cuh"

namespace ortolan::cuda {

constexpr int kKeptTiles = 2;  // of a block's piece, at most

// States [kKeptTiles, rows], then sums [kKeptTiles, rows, head size].
ORTOLAN_HOST_DEVICE constexpr int kept_states_bytes(int rows) {
  return kKeptTiles * rows * static_cast<int>(sizeof(SoftmaxState));
}
ORTOLAN_HOST_DEVICE constexpr int kept_bytes(int rows, int head_size) {
  return kept_states_bytes(rows) + kKeptTiles * rows * head_size * static_cast<int>(sizeof(float));
}

// A workspace whose places are the tiles of the block's piece.
__device__ __forceinline__ DecodeWorkspace kept_workspace(const DecodeWorkspace& workspace,
                                                          unsigned char* memory) {
  DecodeWorkspace own = workspace;
  own.states = reinterpret_cast<SoftmaxState*>(memory);
  own.sums = reinterpret_cast<float*>(memory + kept_states_bytes(workspace.rows));
  return own;
}

// The piece of an even cut into pieces of kKeptTiles tiles at most that holds a tile: no division.
__device__ __forceinline__ int short_owner(const EvenCut& cut, int tile) {
  static_assert(kKeptTiles == 2);
  const auto in_longer = static_cast<int>(cut.remainder * (cut.quotient + 1));
  if (tile < in_longer) return tile >> cut.quotient;
  return static_cast<int>(cut.remainder) + ((tile - in_longer) >> (cut.quotient == 2));
}

}  // namespace ortolan::cuda
