// The frame of kernels for sm_90a in whose blocks one warpgroup loads and the others compute.
//
// Shape: kStages of kStageBytes, through which they hand over; kGroups, the warpgroups that compute; and the
// registers of a thread, kLoadRegisters and kComputeRegisters, together what the block is launched with.
#pragma once

#include "tile_copy_sm90.cuh"

namespace ortolan::cuda {

// Stages in shared memory, and who may use them.
template <typename Shape>
struct StageRing {
  using Stage = Ring<Shape::kStages>;

  Handover<Shape::kStages>& buffers;
  uint32_t stages;  // address, a multiple of what a swizzle spans

  __device__ __forceinline__ StageRing(Handover<Shape::kStages>& buffers, const unsigned char* memory)
      : buffers(buffers), stages((shared_address(memory) + 1023) & ~1023u) {}
  __device__ __forceinline__ uint32_t address(const Stage& at) const {
    return stages + at.place * Shape::kStageBytes;
  }
};

// Calls load() in the last warpgroup and compute(group) in the others, for all blocks of a cluster.
template <typename Shape, typename Load, typename Compute>
__device__ __forceinline__ void run_warpgroups(Load&& load, Compute&& compute) {
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
  if (group == Shape::kGroups) {
    lower_registers<Shape::kLoadRegisters>();
    load();
  } else {
    raise_registers<Shape::kComputeRegisters>();
    compute(group);
  }
  cluster_sync();  // until then the other block loads and arrives here
}

}  // namespace ortolan::cuda
