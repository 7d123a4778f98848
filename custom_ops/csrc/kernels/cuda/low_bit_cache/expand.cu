// Turns codes back into compute elements, for the kernels that read dense caches.
//
// Grid: (slots / 32, kv heads, sequences), and z twice as long for values. A thread takes eight codes at a
// time. Only slots that hold a token are read, and pages outside the pool are not followed.
#include "caches.h"
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/low_bit_rows.h"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSlots = 32;
constexpr size_t kAlignment = 256;

struct Expansion {
  CacheLayout cache;
  ElementType code;
  const uint8_t* codes[2];  // of keys and values
  const float* scales[2];
  void* targets[2];  // [B, Hkv, C, D]
  Lengths lengths;
  const int32_t* query_start;  // [B+1]: tokens that the lengths do not count yet; null: none

  __device__ int64_t length(int64_t sequence, int64_t head) const {
    const int64_t added = query_start ? query_start[sequence + 1] - query_start[sequence] : 0;
    return lengths.at(sequence, head) + added;
  }
};

__device__ __forceinline__ void store_values(float* target, const float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) target[i] = values[i];
}
template <typename Element>
__device__ __forceinline__ void store_values(Element* target, const float (&values)[8]) {
  *reinterpret_cast<uint4*>(target) =
      make_uint4(Half<Element>::pack(values[0], values[1]), Half<Element>::pack(values[2], values[3]),
                 Half<Element>::pack(values[4], values[5]), Half<Element>::pack(values[6], values[7]));
}

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    expand_kernel(const __grid_constant__ Expansion e, int sequences) {
  wait_for_previous_kernel();
  const int64_t head = blockIdx.y, sequence = blockIdx.z % sequences, role = blockIdx.z / sequences;
  const int64_t held = min(e.length(sequence, head), e.cache.capacity);
  const int64_t first = blockIdx.x * int64_t{kSlots};
  const int pieces = static_cast<int>(e.cache.head_size / 8);
  for (int i = threadIdx.x; i < kSlots * pieces; i += kThreads) {
    const int64_t slot = first + i / pieces;
    if (slot >= held) return;
    const int64_t page = e.cache.page(sequence, slot);
    if (page < 0 || page >= e.cache.num_pages) continue;
    const int64_t row = e.cache.row_index(sequence, head, slot), column = i % pieces * 8;
    const uint2 codes = *reinterpret_cast<const uint2*>(e.codes[role] + row * e.cache.head_size + column);
    const float scale = e.scales[role][row];
    float values[8];
#pragma unroll
    for (int b = 0; b < 8; ++b)
      values[b] = scale * code_value(e.code, (b < 4 ? codes.x >> 8 * b : codes.y >> 8 * (b - 4)) & 0xffu);
    const int64_t target = (sequence * e.cache.num_kv_heads + head) * e.cache.capacity + slot;
    store_values(static_cast<Element*>(e.targets[role]) + target * e.cache.head_size + column, values);
  }
}

size_t pool_bytes(const CacheLayout& cache, int64_t sequences, ElementType element) {
  const int64_t bytes =
      sequences * cache.num_kv_heads * cache.capacity * cache.head_size * element_bytes(element);
  return (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
}

cudaError_t expand(const Expansion& e, ElementType element, int64_t sequences, int roles,
                   const Launch& launch) {
  const dim3 grid(static_cast<unsigned>((e.cache.capacity + kSlots - 1) / kSlots),
                  static_cast<unsigned>(e.cache.num_kv_heads), static_cast<unsigned>(roles * sequences));
  return with_element(element, [&]<typename Element>() {
    return launch_overlapped(expand_kernel<Element>, grid, dim3(kThreads), 0, launch, e,
                             static_cast<int>(sequences));
  });
}

void take_workspace(Launch& launch, size_t bytes) {
  launch.workspace = static_cast<char*>(launch.workspace) + bytes;
  launch.workspace_bytes -= bytes;
}

// The pool of the expanded rows: sequence b owns page b, and slots stay what they are.
CacheLayout expanded_layout(CacheLayout cache, int64_t sequences) {
  cache.num_pages = sequences;
  cache.page_slots = cache.capacity;
  cache.pages_per_sequence = 1;
  cache.block_table = nullptr;
  return cache;
}

const uint8_t* codes_of(const void* pool) { return static_cast<const uint8_t*>(pool); }

}  // namespace

size_t expanded_bytes(const SwaAttentionParams& p) {
  return is_code(p.cache_element) ? 2 * pool_bytes(p.cache, p.packing.num_sequences, p.element) : 0;
}

cudaError_t expand_caches(SwaAttentionParams& p, Launch& launch) {
  const int64_t sequences = p.packing.num_sequences;
  const size_t bytes = pool_bytes(p.cache, sequences, p.element);
  void* keys = launch.workspace;
  void* values = static_cast<char*>(launch.workspace) + bytes;
  const Expansion expansion{p.cache,
                            p.cache_element,
                            {codes_of(p.key_cache), codes_of(p.value_cache)},
                            {p.key_scale, p.value_scale},
                            {keys, values},
                            p.past_len,
                            p.packing.query_start};
  take_workspace(launch, 2 * bytes);
  p.cache = expanded_layout(p.cache, sequences);
  p.cache_element = p.element;
  p.key_cache = keys;
  p.value_cache = values;
  p.key_scale = p.value_scale = nullptr;
  return expand(expansion, p.element, sequences, 2, launch);
}

size_t expanded_bytes(const SnapKvScoreParams& p) {
  return is_code(p.cache_element) ? pool_bytes(p.cache, p.num_sequences, p.element) : 0;
}

cudaError_t expand_caches(SnapKvScoreParams& p, Launch& launch) {
  const size_t bytes = pool_bytes(p.cache, p.num_sequences, p.element);
  void* keys = launch.workspace;
  const Expansion expansion{
      p.cache,  p.cache_element, {codes_of(p.key_cache), nullptr}, {p.key_scale, nullptr}, {keys, nullptr},
      p.kv_len, nullptr};
  take_workspace(launch, bytes);
  p.cache = expanded_layout(p.cache, p.num_sequences);
  p.cache_element = p.element;
  p.key_cache = keys;
  p.key_scale = nullptr;
  return expand(expansion, p.element, p.num_sequences, 1, launch);
}

}  // namespace ortolan::cuda
