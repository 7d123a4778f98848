// Every kind of barrier: of a cluster's threads, of some warps of a block, and of arrivals in shared memory.
#pragma once

#include <cstdint>

namespace ortolan::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Blocks in this block's cluster, of sm_90 and later.
__device__ __forceinline__ int cluster_size() {
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctaid.x;\n" : "=r"(blocks));
  return static_cast<int>(blocks);
}
// The barrier of all threads of a cluster, in two halves, for whole warps. It orders no memory accesses.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;\n" ::: "memory");
#endif
}
// The whole barrier; what threads have written before it, all see after it.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::
                   : "memory");
#endif
}

// This block's place in its cluster.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return static_cast<int>(rank);
}

// Barriers of some warps of a block, kThreads threads together; number 0 is __syncthreads'. Those who sync
// wait until the others have synced or arrived.
template <int kThreads>
__device__ __forceinline__ void sync_warps(int number) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(number), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void arrive_warps(int number) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(number), "n"(kThreads) : "memory");
}

// A barrier in shared memory that counts arrivals, of threads and of asynchronous copies. Its phases
// alternate in parity.
struct Barrier {
  uint64_t state;

  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(shared_address(&state)), "r"(arrivals)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile(
        "{\n.reg .b64 ignored;\nmbarrier.arrive.shared.b64 ignored, [%0];\n}\n" ::"r"(shared_address(&state))
        : "memory");
  }
  // For whole warps, which arrive once; what their lanes have read and written before is done.
  __device__ __forceinline__ void arrive_once(int lane) {
    __syncwarp();
    if (lane == 0) arrive();
  }
  // Arrives at the barrier in the same place of a block of the cluster. Releases nothing to other blocks: for
  // buffers that were read.
  __device__ __forceinline__ void arrive_at(int block) {
    asm volatile(
        "{\n.reg .b32 place;\nmapa.shared::cluster.u32 place, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [place];\n}\n" ::"r"(shared_address(&state)),
        "r"(block)
        : "memory");
  }
  // Arrives once the copies that this thread has started are done.
  __device__ __forceinline__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(shared_address(&state))
                 : "memory");
  }
  // Arrives, and has the phase wait for so many bytes of copies; of sm_90 and later.
  __device__ __forceinline__ void arrive_expecting(uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n" ::"r"(shared_address(&state)),
                 "r"(bytes)
                 : "memory");
#endif
  }
  // Waits for the end of the phase with this parity.
  __device__ __forceinline__ void wait(uint32_t parity) {
    uint32_t done = 0;
    while (!done) {
#if __CUDA_ARCH__ >= 900
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
          : "=r"(done)
          : "r"(shared_address(&state)), "r"(parity)
          : "memory");
#else
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
          : "=r"(done)
          : "r"(shared_address(&state)), "r"(parity)
          : "memory");
#endif
    }
  }
};

// Waits for the end of a phase to which other blocks of the cluster contribute; of sm_90 and later.
__device__ __forceinline__ void wait_for_cluster(Barrier& barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(shared_address(&barrier.state)), "r"(parity)
        : "memory");
#endif
}

// Walks a ring of places in shared memory; the parity is that of their barriers in this round.
struct RingPlace {
  int place = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int places) {
    if (++place < places) return;
    place = 0;
    parity ^= 1;
  }
};

// Makes initialised barriers visible to asynchronous copies and to the cluster, of sm_90 and later.
__device__ __forceinline__ void fence_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
}
}  // namespace ortolan::cuda
