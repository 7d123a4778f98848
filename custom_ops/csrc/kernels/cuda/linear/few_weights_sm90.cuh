// How few_sm90.cuh shares a layer's weights, and brings them to shared memory.
#pragma once

#include "few_tokens.h"
#include "gemv_sm90.cuh"

namespace ortolan::cuda {

// How a launch streams its weights, in copies of a step of a group's rows.
struct FewStream {
  static constexpr int kTileRows = 8;  // of a group: one tile or two
  static constexpr int kColumns = 64;  // 128 swizzled bytes
  static constexpr int kTileBytes = kTileRows * RowSlices::kStepBytes;
  static constexpr int kMinRounds = 2, kMaxRounds = 16;
  static constexpr int kMaxTurnRows = 64;

  int tiles;               // of a group
  int cluster;             // blocks that share the slices of their rows
  int groups_per_cluster;  // or one more, in the first `larger_clusters`; clusters take groups in turn
  int larger_clusters;
  RowSlices slices;
  int block_slices;     // most that a block takes
  int groups_per_turn;  // parts wait in shared memory for the end of their turn
  int warps;            // that have units to take
  int rounds;           // buffers of each of them
  int tokens;           // of the pass
  int token_stride;     // bytes between tokens' inputs
  int norm_bytes;

  // Slices of the block of this rank, and the first of them.
  __host__ __device__ int first_slice(int rank) const { return rank * slices.count / cluster; }
  __host__ __device__ int slices_of(int rank) const { return first_slice(rank + 1) - first_slice(rank); }
  // Of sums of a token, apart by an odd multiple of eight: pairs that a warp stores lie in different banks.
  __host__ __device__ int sums_stride() const { return (groups_per_turn * tiles | 1) * kTileRows; }
  __host__ __device__ int turn_sums() const { return slices.count * tokens * sums_stride(); }
  __host__ __device__ int inputs_offset() const { return rounds * warps * tiles * kTileBytes; }
  __host__ __device__ int norm_offset() const { return inputs_offset() + tokens * token_stride; }
  __host__ __device__ int sums_offset() const { return norm_offset() + norm_bytes; }
  __host__ __device__ int barriers_offset() const {
    return sums_offset() + 2 * static_cast<int>(sizeof(float)) * turn_sums();  // of two turns
  }
  __host__ __device__ int shared_bytes() const {
    return barriers_offset() + (rounds * warps + 1) * static_cast<int>(sizeof(Barrier)) +
           1024;  // to align the ring
  }
};

struct FewParams {
  FusedLinearParams linear;
  GemvPass pass;
  FewStream stream;
  CUtensorMap weight;  // [K / 64, 1 or 2, N, 64], boxes of a step of a tile's rows
};

// A step of a slice of a group, as a warp takes them: steps, slices in turn, group after group.
struct FewStep {
  GemvUnit unit;  // its slice counts from the block's first
  int step = 0;

  __device__ __forceinline__ void advance(int steps, const UnitStep& of_warp, int slices) {
    if (++step < steps) return;
    step = 0;
    unit.advance(of_warp, slices);
  }
};

// The weights of a warp on their way through its ring.
template <int kTiles, bool kGated>
struct FewWeights {
  static constexpr int kTileOutputs = kGated ? FewStream::kTileRows / 2 : FewStream::kTileRows;
  static constexpr int kOutputs = kTiles * kTileOutputs;  // of a group
  static constexpr int kCopyBytes = kTiles * FewStream::kTileBytes;

  const FewParams& p;
  int first_slice, slices;  // of the block
  int cluster, clusters;    // the block's, and how many there are
  int groups;               // of the cluster
  char* buffers;
  Barrier* full;
  UnitStep of_warp;    // from one unit of the warp to its next one
  FewStep next, step;  // to be fetched, and to be multiplied
  RingPlace at;

  __device__ __forceinline__ FewWeights(const FewParams& p, char* ring, Barrier* barriers, int rank) : p(p) {
    const int warp = threadIdx.x / 32;
    first_slice = p.stream.first_slice(rank);
    slices = p.stream.slices_of(rank);
    cluster = static_cast<int>(blockIdx.x) / p.stream.cluster;
    clusters = static_cast<int>(gridDim.x) / p.stream.cluster;
    groups = p.stream.groups_per_cluster + (cluster < p.stream.larger_clusters ? 1 : 0);
    buffers = ring + warp * p.stream.rounds * kCopyBytes;
    full = barriers + warp * p.stream.rounds;
    of_warp = UnitStep::of(kGemvWarps, slices);
    next.unit.advance(UnitStep::of(warp, slices), slices);
    step = next;
  }
  __device__ __forceinline__ int first_output(int group) const {
    return (group * clusters + cluster) * kOutputs;
  }
  __device__ __forceinline__ bool all_fetched() const { return next.unit.group >= groups; }
  __device__ __forceinline__ int steps(int slice) const {
    return (p.stream.slices.bytes_of(first_slice + slice) + RowSlices::kStepBytes - 1) /
           RowSlices::kStepBytes;
  }

  // For the whole warp, like what follows: starts to fill the ring.
  __device__ __forceinline__ void start() {
    if (threadIdx.x % 32 < p.stream.rounds && !all_fetched()) full[threadIdx.x % 32].init(1);
    fence_barriers();
    __syncwarp();
#pragma unroll 1
    for (int n = 0; n < p.stream.rounds && !all_fetched(); ++n) fetch(n);
  }
  __device__ __forceinline__ void fetch(int place) {
    if (elect_lane()) {
      const int first =
          (first_slice + next.unit.slice) * p.stream.slices.bytes + next.step * RowSlices::kStepBytes;
      full[place].arrive_expecting(kCopyBytes);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        copy_box(shared_address(buffers + place * kCopyBytes + tile * FewStream::kTileBytes), p.weight, 0,
                 first_output(next.unit.group) + tile * kTileOutputs, 0, first / (2 * FewStream::kColumns),
                 full[place], evict_first_policy());
    }
    next.advance(steps(next.unit.slice), of_warp, slices);
  }
  __device__ __forceinline__ const char* wait() const {
    full[at.place].wait(at.parity);
    return buffers + at.place * kCopyBytes;
  }
  // Hands the step's buffer to a later one; moves on.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (!all_fetched()) {
      fetch(at.place);
      if (all_fetched()) launch_dependents();
    }
    step.advance(steps(step.unit.slice), of_warp, slices);
    at.advance(p.stream.rounds);
  }
};

}  // namespace ortolan::cuda
