// Thin names for the PTX instructions that the sm_80 kernels use: matrix products, tile loads, asynchronous
// copies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "barriers.cuh"

namespace ortolan::cuda {

// Copies 16 bytes to shared memory; where `valid` is false it writes zeros and reads nothing.
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool valid) {
  copy_async_16(shared_address(shared), global, valid);
}

// The same, with a policy for what it leaves in L2.
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global, bool valid,
                                              uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;\n" ::"r"(shared),
               "l"(global), "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}

// The same of 4 bytes, without one.
__device__ __forceinline__ void copy_async_4(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
               : "memory");
}

// The same of 16, unconditionally, at constant distances from two addresses: one instruction.
template <int kSharedBytes, int kGlobalBytes>
__device__ __forceinline__ void copy_async_16_at(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;\n" ::"r"(shared), "l"(global),
               "n"(kSharedBytes), "n"(kGlobalBytes)
               : "memory");
}

// The same, with a policy for what it leaves in L2.
template <int kSharedBytes, int kGlobalBytes>
__device__ __forceinline__ void copy_async_16_at(uint32_t shared, const void* global, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0 + %2], [%1 + %3], 16, %4;\n" ::"r"(shared),
               "l"(global), "n"(kSharedBytes), "n"(kGlobalBytes), "l"(policy)
               : "memory");
}
// Of what is read once: it leaves L2 before all else.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

// Stores a value of 2, 4, 8 or 16 bytes that is soon read, and then written over: it leaves L2 after all
// else. A byte that has to go to memory takes as long as some ten that a stream brings, and none has to where
// the stream is the first to leave.
template <typename Value>
__device__ __forceinline__ void store_kept(Value* target, const Value& value) {
  constexpr int kBytes = sizeof(Value);
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;\n" : "=l"(policy));
  if constexpr (kBytes == 2) {
    uint16_t word;
    memcpy(&word, &value, kBytes);
    asm volatile("st.global.L2::cache_hint.u16 [%0], %1, %2;\n" ::"l"(target), "h"(word), "l"(policy)
                 : "memory");
  } else {
    uint32_t words[kBytes / 4];
    memcpy(words, &value, kBytes);
    if constexpr (kBytes == 4)
      asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;\n" ::"l"(target), "r"(words[0]), "l"(policy)
                   : "memory");
    else if constexpr (kBytes == 8)
      asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;\n" ::"l"(target), "r"(words[0]),
                   "r"(words[1]), "l"(policy)
                   : "memory");
    else
      asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;\n" ::"l"(target),
                   "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "l"(policy)
                   : "memory");
  }
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Loads four 8x8 tiles of 16-bit elements; lane l gives the address of row l % 8 of tile l / 8.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&tile)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(tile[0]), "=r"(tile[1]), "=r"(tile[2]), "=r"(tile[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&tile)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(tile[0]), "=r"(tile[1]), "=r"(tile[2]), "=r"(tile[3])
               : "r"(address)
               : "memory");
}

// Transposes an 8x8 tile of 16-bit elements that lies in the registers of a warp.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t tile) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(transposed) : "r"(tile));
  return transposed;
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
  uint2 words;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n" : "=r"(words.x), "=r"(words.y) : "r"(address) : "memory");
  return words;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
  return pair;
}
__device__ __forceinline__ float4 load_shared_quad(uint32_t address) {
  float4 quad;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(quad.x), "=f"(quad.y), "=f"(quad.z), "=f"(quad.w)
               : "r"(address)
               : "memory");
  return quad;
}
// Stores 16 bytes to shared memory, and loads them.
__device__ __forceinline__ void store_shared_16(uint32_t address, const uint4& values) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(values.x), "r"(values.y),
               "r"(values.z), "r"(values.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 values;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
               : "r"(address)
               : "memory");
  return values;
}

// 16-bit element types: conversion from float pairs (low half first) and the m16n8k16 product.
template <typename Element>
struct Half;

template <>
struct Half<__nv_bfloat16> {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  }
  // sum[16x8] += a[16x16] * b[16x8], float32 sums.
  static __device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                                      uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

template <>
struct Half<__half> {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
  static __device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                                      uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// The body of a kernel on an architecture that it is not written for: its launch fails, where an empty one
// would leave the output as it was.
__device__ __forceinline__ void refuse_architecture() { __trap(); }

// Lets the next kernel in the stream start before this one ends, and waits for the one before; both do
// nothing where the launch did not ask for overlap.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
// Whether the block is the first of its grid. One must wait even if none has work, since who comes next
// relies on the kernel before this one.
__device__ __forceinline__ bool is_first_block() { return blockIdx.x + blockIdx.y + blockIdx.z == 0; }
// Reads a word of each line of a kernel's parameters. A kernel's first reads of them take as long as reads of
// global memory do, one after the other: better before it waits than after.
template <typename... Parameters>
__device__ __forceinline__ void touch_parameters(const Parameters&... parameters) {
#if __CUDA_ARCH__ >= 900
  constexpr int kLineWords = 16;
  const auto touch = [](const auto& parameter) {
    constexpr auto kWords = static_cast<int>(sizeof(parameter) / 4);
    const auto* words = reinterpret_cast<const uint32_t*>(&parameter);
#pragma unroll
    for (int n = 0; n < kWords; n += kLineWords) asm volatile("" ::"r"(words[n]));
    asm volatile("" ::"r"(words[kWords - 1]));
  };
  (touch(parameters), ...);
#endif
}

// True for one lane of a whole warp; of sm_90 and later. The compiler knows that there is only one: copies by
// the copy engine, whose operands all lanes must share, are then issued without a loop over lanes.
__device__ __forceinline__ bool elect_lane() {
  uint32_t elected = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(elected));
#endif
  return elected;
}
// Copies a multiple of 16 bytes to shared memory by the copy engine of sm_90 and later; the barrier counts
// them.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes,
                                          Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
          shared),
      "l"(global), "r"(bytes), "r"(shared_address(&barrier.state))
      : "memory");
}
// The same, with a policy for what it leaves in L2.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes,
                                          Barrier& barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;\n" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(shared_address(&barrier.state)), "l"(policy)
      : "memory");
}
// Stores two values at an address of this block's shared memory, in a block of its cluster.
__device__ __forceinline__ void store_pair_at(uint32_t shared, int block, float x, float y) {
  asm volatile(
      "{\n.reg .b32 place;\nmapa.shared::cluster.u32 place, %0, %1;\n"
      "st.shared::cluster.v2.f32 [place], {%2, %3};\n}\n" ::"r"(shared),
      "r"(block), "f"(x), "f"(y)
      : "memory");
}
// Starts to store one value, two or four, at an address of this block's shared memory, in a block of its
// cluster; the barrier in the same place of that block counts their bytes. Of sm_90 and later.
__device__ __forceinline__ void send_to(uint32_t shared, int block, float value, Barrier& barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 place, counter;\nmapa.shared::cluster.u32 place, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [place], %3, [counter];\n}\n" ::"r"(
          shared),
      "r"(shared_address(&barrier.state)), "r"(block), "f"(value)
      : "memory");
#endif
}
__device__ __forceinline__ void send_to(uint32_t shared, int block, const float2& values, Barrier& barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 place, counter;\nmapa.shared::cluster.u32 place, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [place], {%3, %4}, [counter];\n"
      "}\n" ::"r"(shared),
      "r"(shared_address(&barrier.state)), "r"(block), "f"(values.x), "f"(values.y)
      : "memory");
#endif
}
__device__ __forceinline__ void send_to(uint32_t shared, int block, const float4& values, Barrier& barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 place, counter;\nmapa.shared::cluster.u32 place, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [place], {%3, %4, %5, %6}, "
      "[counter];\n"
      "}\n" ::"r"(shared),
      "r"(shared_address(&barrier.state)), "r"(block), "f"(values.x), "f"(values.y), "f"(values.z),
      "f"(values.w)
      : "memory");
#endif
}
// An address of this block's shared memory, as one of a block of its cluster.
__device__ __forceinline__ uint32_t place_at(uint32_t shared, int block) {
  uint32_t place = shared;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(place) : "r"(shared), "r"(block));
#endif
  return place;
}
// Brings a multiple of 16 bytes to L2. Nothing is read: what other kernels write there later is seen.
__device__ __forceinline__ void prefetch_bulk(const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(global), "r"(bytes) : "memory");
#endif
}
// Loads what another kernel may be writing: past L1, where the old value would stay.
__device__ __forceinline__ int32_t load_relaxed(const int32_t* global) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(global) : "memory");
  return value;
}
// Copies a multiple of 16 bytes from shared memory, in this thread's open group.
__device__ __forceinline__ void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Until all groups have read what they store.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}
// Until all groups have written.
__device__ __forceinline__ void bulk_wait_written() {
  asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
}

}  // namespace ortolan::cuda
