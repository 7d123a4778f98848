// Products of the two blocks of a cluster become one another's: each has summed over its half of a head's
// columns. On sm_90a.
#pragma once

#include "kernels/cuda/common/ptx.cuh"

namespace ortolan::cuda {

// A copy to another block's shared memory that its barrier counts.
__device__ __forceinline__ void store_async_16(uint32_t place, const float* values, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n" ::
          "r"(place),
      "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(barrier)
      : "memory");
}
// Barriers of what has come from the other block, and of what the other block has read.
template <typename Shape>
struct Sm90Exchange {
  Barrier arrived[Shape::kGroups], read[Shape::kGroups];

  __device__ __forceinline__ void init() {
    for (int group = 0; group < Shape::kGroups; ++group) {
      arrived[group].init(1);
      read[group].init(4);
    }
  }

  // Adds what the same thread of the other block holds: both get the same bits, as two numbers have one sum.
  // `buffers`: a group's after another's.
  template <int kCount>
  __device__ __forceinline__ void add_others(float (&z)[kCount], uint32_t buffers, int group,
                                             uint32_t& parity) {
    static_assert(kCount % 4 == 0 && kCount * 512 * Shape::kGroups == Shape::kExchangeBytes);
    const int other = cluster_rank() ^ 1, thread = threadIdx.x % 128;
    const uint32_t buffer = buffers + group * kCount * 512 + thread * 16;
    const uint32_t target = place_at(buffer, other);
    const uint32_t target_arrived = place_at(shared_address(&arrived[group].state), other);
    read[group].wait(parity ^ 1);
    if (thread == 0) arrived[group].arrive_expecting(kCount * 512);
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) store_async_16(target + n * 2048, z + n * 4, target_arrived);
    arrived[group].wait(parity);
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
      const uint4 values = load_shared_16(buffer + n * 2048);
      z[n * 4] += __uint_as_float(values.x);
      z[n * 4 + 1] += __uint_as_float(values.y);
      z[n * 4 + 2] += __uint_as_float(values.z);
      z[n * 4 + 3] += __uint_as_float(values.w);
    }
    __syncwarp();
    if (thread % 32 == 0) read[group].arrive_at(other);
    parity ^= 1;
  }
};

}  // namespace ortolan::cuda
