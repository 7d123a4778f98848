// Turns codes back into compute elements, for the kernels that read dense caches.
//
// A fixed number of blocks takes pieces of 64 slots by turns, of all expanded sequences: which those are,
// only the device knows, and where there are none the blocks leave at once. A thread takes eight codes at a
// time. Only slots that hold a token and that some query may see are read, and pages outside the pool are not
// followed.
#include <algorithm>

#include "caches.h"
#include "kernels/cuda/attention/decode/codes.cuh"
#include "kernels/cuda/attention/key_rows.cuh"
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksEach = 4;  // of a multiprocessor
constexpr int kSlots = 64;
constexpr int kMostTileKeys = 128;  // of the kernels that read what is expanded
constexpr size_t kAlignment = 256;

struct Expansion {
  CacheLayout cache;
  ElementType code;
  int roles;                // 2: keys and values; 1: keys
  const uint8_t* codes[2];  // of keys and values
  const float* scales[2];
  void* targets[2];  // [pages, Hkv, page slots, D]
  int64_t page_slots;
  int pages;
  int sequences;
  Lengths lengths;
  const int32_t* query_start;  // [B+1]: tokens that the lengths do not count yet; null: none
  int64_t most_decode;         // new tokens of a sequence that is not expanded; -1: all are
  int64_t window;              // -1: every slot is seen
  int32_t* table;              // [B]: the sequences' pages; null: sequence b owns page b

  __device__ __forceinline__ int64_t added(int64_t sequence) const {
    return query_start ? query_start[sequence + 1] - query_start[sequence] : 0;
  }
  // Whether a slot's page lies in the pool.
  __device__ __forceinline__ bool holds(const KeyRows& rows, int slot) const {
    if (!rows.pages) return true;
    const int page = rows.pages[slot / static_cast<int>(cache.page_slots)];
    return 0 <= page && page < cache.num_pages;
  }
};

// Slots of one (sequence, kv head) that are expanded: 0 .. sink_end and begin .. end.
struct ExpandedSlots {
  int64_t sink_end, begin, end;

  // Tiles are read whole, so slots beside those that are seen are too. In a ring that has wrapped any may be.
  static __device__ __forceinline__ ExpandedSlots of(const Expansion& e, int64_t sequence, int64_t head) {
    const int64_t past = e.lengths.at(sequence, head), length = past + e.added(sequence);
    const bool is_all = e.window < 0 || length > e.cache.capacity;
    const int64_t begin = is_all ? 0 : past - e.window + 1 - kMostTileKeys;
    return {e.cache.sink > 0 ? e.cache.sink + kMostTileKeys : 0, begin, min(length, e.cache.capacity)};
  }
  __device__ __forceinline__ bool hold(int64_t slot) const {
    return slot < end && (slot >= begin || slot < sink_end);
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

// Eight codes, times their row's scale, in the compute element type.
template <typename Code, typename Element>
__device__ __forceinline__ void expand_eight(Element* target, const uint2& codes, float scale) {
  uint32_t pairs[4];
  Halves<Code>::of_neighbours(codes.x, pairs[0], pairs[1]);
  Halves<Code>::of_neighbours(codes.y, pairs[2], pairs[3]);
  float values[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = Half<__half>::unpack(pairs[i]);
    values[2 * i] = scale * pair.x;
    values[2 * i + 1] = scale * pair.y;
  }
  store_values(target, values);
}

// A piece of one (sequence, kv head, role); for a whole block. Several loads are on their way at a time.
template <typename Code, typename Element>
__device__ __forceinline__ void expand_piece(const Expansion& e, int sequence, int page, int head, int role,
                                             int first) {
  constexpr int kBatch = 4;
  const ExpandedSlots slots = ExpandedSlots::of(e, sequence, head);
  if (first >= slots.end) return;
  const KeyRows rows(e.cache, sequence, head);
  const int row_units = static_cast<int>(e.cache.head_size / 8), units = kSlots * row_units;
  const int64_t target_row = (int64_t{page} * e.cache.num_kv_heads + head) * e.page_slots + first;
  Element* target = static_cast<Element*>(e.targets[role]) + target_row * e.cache.head_size;
  for (int begin = threadIdx.x; begin < units; begin += kBatch * kThreads) {
    uint2 codes[kBatch];
    float scales[kBatch];
    bool valid[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int unit = begin + u * kThreads, row = unit / row_units;
      valid[u] = unit < units && slots.hold(first + row) && e.holds(rows, first + row);
      if (!valid[u]) continue;
      const int64_t number = rows.number(first + row);
      codes[u] = *reinterpret_cast<const uint2*>(e.codes[role] + number * e.cache.head_size +
                                                 (unit - row * row_units) * 8);
      scales[u] = e.scales[role][number];
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u)
      if (valid[u]) expand_eight<Code>(target + (begin + u * kThreads) * 8, codes[u], scales[u]);
  }
}

template <typename Code, typename Element>
__global__ void __launch_bounds__(kThreads, kBlocksEach) expand_kernel(const __grid_constant__ Expansion e) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32, heads = static_cast<int>(e.cache.num_kv_heads);
  const auto chunks = static_cast<int>((e.cache.capacity + kSlots - 1) / kSlots);
  int page = 0;
  unsigned turn = blockIdx.x;  // pieces that other blocks take before this one's next
  for (int first = 0; first < e.sequences; first += 32) {
    const int own = first + lane;
    const bool is_expanded = own < e.sequences && e.added(own) > e.most_decode;
    unsigned found = __ballot_sync(~0u, is_expanded);
    if (e.table && blockIdx.x == 0 && threadIdx.x < 32 && own < e.sequences)
      e.table[own] = is_expanded ? page + __popc(found & ((1u << lane) - 1)) : 0;
    for (; found && page < e.pages; found &= found - 1, ++page) {
      const int sequence = first + __ffs(static_cast<int>(found)) - 1;
      const auto pieces = static_cast<unsigned>(chunks * heads * e.roles);
      for (; turn < pieces; turn += gridDim.x) {
        const int chunk = static_cast<int>(turn % chunks), head_role = static_cast<int>(turn / chunks);
        expand_piece<Code, Element>(e, sequence, e.table ? page : sequence, head_role % heads,
                                    head_role / heads, chunk * kSlots);
      }
      turn -= pieces;
    }
  }
}

size_t aligned(int64_t bytes) {
  return (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
}

// Whole tiles, which pages of a table must hold.
int64_t page_slots(const CacheLayout& cache) {
  return (cache.capacity + kMostTileKeys - 1) / kMostTileKeys * kMostTileKeys;
}

size_t pool_bytes(const CacheLayout& cache, int64_t pages, ElementType element) {
  return aligned(pages * cache.num_kv_heads * page_slots(cache) * cache.head_size * element_bytes(element));
}

// Sequences that may have more than `most_decode` tokens.
int64_t expanded_pages(const Packing& packing, int most_decode) {
  return std::min(packing.num_sequences, packing.num_tokens / (most_decode + 1));
}

cudaError_t expand(const Expansion& e, ElementType element, int64_t pages, const Launch& launch) {
  const int64_t chunks = (e.cache.capacity + kSlots - 1) / kSlots;
  const int64_t blocks = std::min<int64_t>(pages * e.roles * e.cache.num_kv_heads * chunks,
                                           kBlocksEach * launch.device.num_multiprocessors);
  return with_element(element, [&]<typename Element>() {
    const auto kernel =
        e.code == ElementType::kInt8 ? expand_kernel<Int8Code, Element> : expand_kernel<Float8Code, Element>;
    return launch_overlapped(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, launch, e);
  });
}

char* take_workspace(Launch& launch, size_t bytes) {
  char* taken = static_cast<char*>(launch.workspace);
  launch.workspace = taken + bytes;
  launch.workspace_bytes -= bytes;
  return taken;
}

// The pool of the expanded rows: slots stay what they are.
CacheLayout expanded_layout(const CacheLayout& cache, int64_t pages, const int32_t* table) {
  CacheLayout layout = cache;
  layout.num_pages = pages;
  layout.page_slots = page_slots(cache);
  layout.pages_per_sequence = 1;
  layout.block_table = table;
  return layout;
}

const uint8_t* codes_of(const void* pool) { return static_cast<const uint8_t*>(pool); }

// A page for each sequence needs no table.
size_t table_bytes(int64_t sequences, int64_t pages) {
  return pages < sequences ? aligned(sequences * sizeof(int32_t)) : 0;
}

}  // namespace

size_t expanded_bytes(const SwaAttentionParams& p, int most_decode) {
  const int64_t pages = expanded_pages(p.packing, most_decode);
  if (!is_code(p.cache_element) || pages == 0) return 0;
  return table_bytes(p.packing.num_sequences, pages) + 2 * pool_bytes(p.cache, pages, p.element);
}

cudaError_t expand_caches(SwaAttentionParams& p, Launch& launch, int most_decode) {
  const int64_t sequences = p.packing.num_sequences, pages = expanded_pages(p.packing, most_decode);
  const size_t bytes = pool_bytes(p.cache, pages, p.element);
  char* table = take_workspace(launch, table_bytes(sequences, pages));
  char* pools = take_workspace(launch, 2 * bytes);
  const Expansion expansion{
      .cache = p.cache,
      .code = p.cache_element,
      .roles = 2,
      .codes = {codes_of(p.key_cache), codes_of(p.value_cache)},
      .scales = {p.key_scale, p.value_scale},
      .targets = {pools, pools + bytes},
      .page_slots = page_slots(p.cache),
      .pages = static_cast<int>(pages),
      .sequences = static_cast<int>(sequences),
      .lengths = p.past_len,
      .query_start = p.packing.query_start,
      .most_decode = most_decode,
      .window = p.causal && !p.prefix_end ? p.window : -1,
      .table = pages < sequences ? reinterpret_cast<int32_t*>(table) : nullptr,
  };
  p.cache = expanded_layout(p.cache, pages, expansion.table);
  p.cache_element = p.element;
  p.key_cache = pools;
  p.value_cache = pools + bytes;
  p.key_scale = p.value_scale = nullptr;
  return expand(expansion, p.element, pages, launch);
}

size_t expanded_bytes(const SnapKvScoreParams& p) {
  return is_code(p.cache_element) ? pool_bytes(p.cache, p.num_sequences, p.element) : 0;
}

cudaError_t expand_caches(SnapKvScoreParams& p, Launch& launch) {
  char* keys = take_workspace(launch, expanded_bytes(p));
  const Expansion expansion{
      .cache = p.cache,
      .code = p.cache_element,
      .roles = 1,
      .codes = {codes_of(p.key_cache), nullptr},
      .scales = {p.key_scale, nullptr},
      .targets = {keys, nullptr},
      .page_slots = page_slots(p.cache),
      .pages = static_cast<int>(p.num_sequences),
      .sequences = static_cast<int>(p.num_sequences),
      .lengths = p.kv_len,
      .query_start = nullptr,
      .most_decode = -1,
      .window = -1,
      .table = nullptr,
  };
  p.cache = expanded_layout(p.cache, p.num_sequences, nullptr);
  p.cache_element = p.element;
  p.key_cache = keys;
  p.key_scale = nullptr;
  return expand(expansion, p.element, p.num_sequences, launch);
}

}  // namespace ortolan::cuda
