// Kernels that a step launches for sequences which it may not have: the host does not know whose its tokens
// are.
#pragma once

#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/ptx.cuh"

namespace ortolan::cuda {

// Whether a kernel behind another one of the same step finds no sequence of its own; for whole blocks, at
// their start. What the step was given may be read already: the kernel in front let this one start once all
// of its blocks had waited for it.
__device__ __forceinline__ bool is_in_vain(const Packing& packing, const OwnTokens& own) {
  bool is_own = false;
#pragma unroll 1
  for (auto sequence = static_cast<int>(threadIdx.x) % 32; sequence < packing.num_sequences; sequence += 32)
    is_own |= own.hold(static_cast<int>(packing.count(sequence)));
  if (__any_sync(~0u, is_own)) return false;
  launch_dependents();
  if (is_first_block()) wait_for_previous_kernel();
  return true;
}

}  // namespace ortolan::cuda
