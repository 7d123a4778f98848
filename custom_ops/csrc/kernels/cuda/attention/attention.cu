// Chooses attention's kernels: by element type, head size and device, and for each sequence by its own token
// count.
#include <algorithm>
#include <atomic>

#include "decode/rows.cuh"
#include "instances.h"
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/low_bit_cache/caches.h"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {
namespace {

// Calls f.operator()<Rows, kRowTiles>() for the smallest decode instance of a kind of rows that holds the
// head.
template <template <typename, int> typename Rows, typename Type, typename Function>
auto with_decode_instance(const SwaAttentionParams& params, Function&& f) {
  const bool one_tile = expected_rows(params, kDecodeTokens) <= kDecodeTileRows;
  const int64_t head_size = params.cache.head_size;
  const auto with_tiles = [&]<int kHeadSize>() {
    return one_tile ? f.template operator()<Rows<Type, kHeadSize>, 1>()
                    : f.template operator()<Rows<Type, kHeadSize>, 2>();
  };
  if (head_size <= 64) return with_tiles.template operator()<64>();
  if (head_size <= 128) return with_tiles.template operator()<128>();
  return with_tiles.template operator()<256>();
}

// Calls it for the dense rows of the element type, or for the codes of the cache.
template <typename Function>
auto with_decode_rows(const SwaAttentionParams& params, Function&& f) {
  if (params.cache_element == ElementType::kInt8) return with_decode_instance<CodeRows, Int8Code>(params, f);
  if (is_code(params.cache_element)) return with_decode_instance<CodeRows, Float8Code>(params, f);
  return with_half_element(params.element, [&]<typename Element>() {
    if (params.cache.head_size > 256) return f.template operator()<DenseRows<Element, 512>, 1>();
    return with_decode_instance<DenseRows, Element>(params, f);
  });
}

// Whether decode attention reads codes as they are: rows must be whole pieces of 16 bytes.
bool decodes_codes(const SwaAttentionParams& params) {
  return is_code(params.cache_element) && params.element != ElementType::kFloat32 &&
         params.cache.head_size % 16 == 0 && params.cache.head_size <= 256;
}

// Whether decode attention goes by wgmma. With shorter heads the other family is up to 15 % faster for one
// token.
bool decodes_by_wgmma(const SwaAttentionParams& params, const Device& device) {
  return device.compute_capability == 90 && params.cache.head_size > 256 && !decodes_codes(params);
}

// Keys that a query sees, at most; prefixes apart.
int64_t most_keys(const SwaAttentionParams& params) {
  return params.window < 0 ? params.cache.capacity : std::min(params.window, params.cache.capacity);
}

constexpr int kShortHead = 64;

// Whether more rows than mma.sync takes well at once go to a kernel by wgmma that adds up in the same order:
// it reads keys once for up to 64 of them. Where one sequence has short or few keys, reading them again from
// L2 takes less time; and the table of sequences must leave room in shared memory.
bool decodes_few_by_wgmma(const SwaAttentionParams& params, const Device& device) {
  constexpr int64_t kFewKeys = 1024;
  const bool is_short = params.cache.head_size <= kShortHead;
  const int mma_rows = (is_short ? 2 : 1) * kDecodeTileRows;
  const bool reads_again = params.packing.num_sequences == 1 && (is_short || most_keys(params) <= kFewKeys);
  return device.compute_capability == 90 && params.cache.head_size <= 256 && !decodes_codes(params) &&
         expected_rows(params, kDecodeTokens) > mma_rows && !reads_again &&
         params.packing.num_sequences * params.cache.num_kv_heads <= kMostFewPairs;
}

// The parameters as dense kernels see them once caches are expanded, for what sizes follow from.
SwaAttentionParams dense(SwaAttentionParams params) {
  params.cache_element = params.element;
  return params;
}

// New tokens of a sequence that decode takes, at most.
int most_decode_tokens(const SwaAttentionParams& params, const Device& device) {
  return decode_tokens(params, decodes_by_wgmma(params, device) ? kShortTokens : kDecodeTokens);
}

// Calls f.operator()<Rows>() for the smallest of the instances of Sm90FewRows that holds the rows.
template <typename Element, int kHeadSize, typename Function>
auto with_few_rows(const SwaAttentionParams& params, Function&& f) {
  const int rows = expected_rows(params, kDecodeTokens);
  if constexpr (kHeadSize > kShortHead)
    if (rows <= 16) return f.template operator()<Sm90FewRows<Element, kHeadSize, 16>>();
  if (rows <= 32) return f.template operator()<Sm90FewRows<Element, kHeadSize, 32>>();
  return f.template operator()<Sm90FewRows<Element, kHeadSize, 64>>();
}

// The same of Sm90WideRows.
template <typename Element, typename Function>
auto with_wide_rows(const SwaAttentionParams& params, Function&& f) {
  const int rows = expected_rows(params, kShortTokens);
  if (rows <= 16) return f.template operator()<Sm90WideRows<Element, 512, 16>>();
  if (rows <= 32) return f.template operator()<Sm90WideRows<Element, 512, 32>>();
  return f.template operator()<Sm90WideRows<Element, 512, 64>>();
}

// Calls f.operator()<Rows>() for the instance of decode attention by wgmma that takes the parameters: the
// smallest that holds the head. What a cache's rows lack becomes zeros in shared memory, and is not read. By
// mma.sync: by_mma.operator()<Rows, kRowTiles>().
template <typename Function, typename MmaFunction>
auto with_decode(const SwaAttentionParams& params, const Device& device, Function&& f, MmaFunction&& by_mma) {
  const int64_t head_size = params.cache.head_size;
  const bool is_few = decodes_few_by_wgmma(params, device);
  if (!is_few && !decodes_by_wgmma(params, device)) return with_decode_rows(params, by_mma);
  return with_half_element(params.element, [&]<typename Element>() {
    if (is_few && head_size <= 64) return with_few_rows<Element, 64>(params, f);
    if (is_few && head_size <= 128) return with_few_rows<Element, 128>(params, f);
    if (is_few) return with_few_rows<Element, 256>(params, f);
    return with_wide_rows<Element>(params, f);
  });
}

template <typename Function>
auto with_prefill_head_size(int64_t head_size, Function&& f) {
  if (head_size <= 64) return f.template operator()<64>();
  if (head_size <= 80) return f.template operator()<80>();
  if (head_size <= 96) return f.template operator()<96>();
  if (head_size <= 128) return f.template operator()<128>();
  if (head_size <= 192) return f.template operator()<192>();
  if (head_size <= 256) return f.template operator()<256>();
  return f.template operator()<512>();
}

// The generation of GPUs that device code is compiled for. Plain sm_90 counts as the one before: without the
// instructions of sm_90a the kernels for compute capability 9.0 cannot run.
#if __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kCodeGeneration = 9;
#elif __CUDA_ARCH__ >= 1000
constexpr int kCodeGeneration = __CUDA_ARCH__ / 100;
#else
constexpr int kCodeGeneration = 8;
#endif

// The bound on its threads tells the host which of the library's codes runs on a device: that is not the
// device's own where PTX of an older generation was compiled for it.
__global__ void __launch_bounds__(32 * kCodeGeneration) generation_kernel() {}

cudaError_t read_code_generation(int device, int& generation) {
  static std::atomic<int> known[kKnownDevices];
  const bool has_place = device < kKnownDevices;
  generation = has_place ? known[device].load() : 0;
  if (generation) return cudaSuccess;
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, generation_kernel);
  generation = attributes.maxThreadsPerBlock / 32;
  if (has_place && error == cudaSuccess) known[device] = generation;
  return error;
}

cudaError_t attribute(cudaDeviceAttr name, int device, int& value) {
  return cudaDeviceGetAttribute(&value, name, device);
}

}  // namespace

cudaError_t current_device(Device& device) {
  int major = 0, minor = 0;
  if (const cudaError_t error = cudaGetDevice(&device.ordinal); error != cudaSuccess) return error;
  const int ordinal = device.ordinal;
  for (const cudaError_t error :
       {attribute(cudaDevAttrComputeCapabilityMajor, ordinal, major),
        attribute(cudaDevAttrComputeCapabilityMinor, ordinal, minor),
        attribute(cudaDevAttrMultiProcessorCount, ordinal, device.num_multiprocessors),
        attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal, device.shared_bytes_per_block)})
    if (error != cudaSuccess) return error;
  int generation = 0;
  const cudaError_t error = read_code_generation(ordinal, generation);
  device.compute_capability = std::min(10 * major + minor, 10 * generation + 9);
  return error;
}

cudaError_t attention_decode(const SwaAttentionParams& params, const Launch& launch) {
  return with_decode(
      params, launch.device, [&]<typename Rows>() { return launch_sm90_decode<Rows>(params, launch); },
      [&]<typename Rows, int kRowTiles>() { return launch_decode<Rows, kRowTiles>(params, launch); });
}

size_t attention_decode_workspace(const SwaAttentionParams& params, const Device& device) {
  return with_decode(
      params, device, [&]<typename Rows>() { return sm90_decode_workspace_bytes<Rows>(params, device); },
      [&]<typename Rows, int kRowTiles>() {
        return decode_workspace_bytes<Rows, kRowTiles>(params, device);
      });
}

cudaError_t attention_prefill_mma(const SwaAttentionParams& params, const Launch& launch, int most_decode) {
  return with_half_element(params.element, [&]<typename Element>() {
    return with_prefill_head_size(params.cache.head_size, [&]<int kHeadSize>() {
      return launch_mma_prefill<Element, kHeadSize>(params, launch, most_decode);
    });
  });
}

bool attention_prefill_sm90_takes(const SwaAttentionParams& params, const Device& device) {
  const bool pages_align = !params.cache.block_table || params.cache.page_slots % 8 == 0;
  return device.compute_capability == 90 && params.element != ElementType::kFloat32 && pages_align;
}

namespace {

// Whether a step may have short chunks with a kernel of their own: where all keys are seen, as few keys of a
// window are not worth splitting.
bool may_have_short_chunks(const SwaAttentionParams& params, int most_decode) {
  constexpr int64_t kMostGroup = 64;  // rows of a warpgroup
  const Packing& packing = params.packing;
  return (packing.num_sequences > 1 || packing.num_tokens <= kShortTokens) && params.window < 0 &&
         params.cache.head_size <= 256 && most_decode < kShortTokens &&
         params.num_heads <= params.cache.num_kv_heads * kMostGroup;
}

// Calls f.operator()<kHeadSize, kKeyRows>() for the tile of keys that prefill by wgmma has for heads of up to
// 256 columns.
template <typename Function>
auto with_sm90_tile(int64_t head_size, Function&& f) {
  if (head_size <= 64) return f.template operator()<64, 128>();
  if (head_size <= 96) return f.template operator()<96, 112>();
  if (head_size <= 128) return f.template operator()<128, 128>();
  if (head_size <= 192) return f.template operator()<192, 112>();
  return f.template operator()<256, 80>();
}

// Calls f.operator()<Element, kHeadSize, kKeyRows>() for the instance that takes short chunks.
template <typename Function>
auto with_short_instance(const SwaAttentionParams& params, Function&& f) {
  return with_half_element(params.element, [&]<typename Element>() {
    return with_sm90_tile(params.cache.head_size, [&]<int kHeadSize, int kKeyRows>() {
      return f.template operator()<Element, kHeadSize, kKeyRows>();
    });
  });
}

cudaError_t prefill_sm90(const SwaAttentionParams& params, const Launch& launch, const OwnTokens& own) {
  return with_half_element(params.element, [&]<typename Element>() {
    if (params.cache.head_size > 256) return launch_sm90_prefill<Element, 512, 64>(params, launch, own);
    return with_sm90_tile(params.cache.head_size, [&]<int kHeadSize, int kKeyRows>() {
      // Tiles much longer than a window are mostly masked.
      if constexpr (kHeadSize == 64 || kHeadSize == 128)
        if (params.window >= 0 && params.window <= 128)
          return launch_sm90_prefill<Element, kHeadSize, 64>(params, launch, own);
      return launch_sm90_prefill<Element, kHeadSize, kKeyRows>(params, launch, own);
    });
  });
}

}  // namespace

cudaError_t attention_prefill_sm90(const SwaAttentionParams& params, const Launch& launch, int most_decode) {
  if (!may_have_short_chunks(params, most_decode)) return prefill_sm90(params, launch, {most_decode});
  Launch rest = launch;
  if (most_new_tokens(params) > kShortTokens) {
    if (const cudaError_t error = prefill_sm90(params, launch, {kShortTokens}); error != cudaSuccess)
      return error;
    rest.is_behind = true;
  }
  return with_short_instance(params, [&]<typename Element, int kHeadSize, int kKeyRows>() {
    return launch_sm90_short<Element, kHeadSize, kKeyRows>(params, rest, {most_decode, kShortTokens});
  });
}

size_t attention_prefill_sm90_workspace(const SwaAttentionParams& params, const Device& device,
                                        int most_decode) {
  constexpr size_t kCountersAlone = 1;
  if (!may_have_short_chunks(params, most_decode)) return kCountersAlone;
  return with_short_instance(params, [&]<typename Element, int kHeadSize, int kKeyRows>() {
    return sm90_short_workspace_bytes<Element, kHeadSize, kKeyRows>(params, device,
                                                                    {most_decode, kShortTokens});
  });
}

namespace {

// The kernel families that a step may need; which sequences are whose, only the device knows.
struct StepPlan {
  int most_decode;    // new tokens of a sequence that decode takes, at most
  int most_of_codes;  // new tokens of a sequence whose codes are read as they are, at most
  bool prefills;      // whether some sequence may have more than most_decode
  bool decodes;       // whether some sequence may have no more than that
  bool expands;       // whether some sequence may have more than most_of_codes

  StepPlan(const SwaAttentionParams& params, const Device& device)
      : most_decode(most_decode_tokens(params, device)),
        most_of_codes(decodes_codes(params) ? most_decode : 0),
        prefills(most_new_tokens(params) > most_decode),
        decodes(params.packing.num_sequences > 1 || !prefills),
        expands(is_code(params.cache_element) && most_new_tokens(params) > most_of_codes) {}
};

}  // namespace

size_t swa_attention_workspace(const SwaAttentionParams& params, const Device& device) {
  if (params.packing.num_tokens == 0) return 0;
  const StepPlan plan(params, device);
  const size_t expanded = plan.expands ? expanded_bytes(params, plan.most_of_codes) : 0;
  if (params.element == ElementType::kFloat32) return expanded;
  size_t bytes = 0;
  if (plan.prefills && attention_prefill_sm90_takes(dense(params), device))
    bytes = attention_prefill_sm90_workspace(dense(params), device, plan.most_decode);
  if (plan.decodes)
    bytes =
        std::max(bytes, attention_decode_workspace(decodes_codes(params) ? params : dense(params), device));
  return expanded + bytes;
}

cudaError_t swa_attention(const SwaAttentionParams& params, const Launch& launch) {
  if (params.packing.num_tokens == 0) return cudaSuccess;
  const int bytes = vector_bytes(16, {params.query, params.key_cache, params.value_cache, params.output});
  if (bytes < (params.element == ElementType::kFloat32 ? 4 : 16)) return cudaErrorMisalignedAddress;
  const StepPlan plan(params, launch.device);
  SwaAttentionParams expanded = params;
  Launch rest = launch;
  if (plan.expands)
    if (const cudaError_t error = expand_caches(expanded, rest, plan.most_of_codes); error != cudaSuccess)
      return error;
  if (params.element == ElementType::kFloat32) return attention_float32(expanded, rest);
  if (plan.prefills) {
    const cudaError_t error = attention_prefill_sm90_takes(expanded, rest.device)
                                  ? attention_prefill_sm90(expanded, rest, plan.most_decode)
                                  : attention_prefill_mma(expanded, rest, plan.most_decode);
    if (error != cudaSuccess || !plan.decodes) return error;
    rest.is_behind = true;
  }
  return attention_decode(decodes_codes(params) ? params : expanded, rest);
}

}  // namespace ortolan::cuda
