// How much scratch memory decode attention asks for, as a plain C symbol: for callers outside ONNX Runtime
// (ctypes), on machines with and without a GPU.
#include <algorithm>
#include <optional>

#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/operators.generated.h"

#define ORTOLAN_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using ortolan::ElementType;
using ortolan::SwaAttentionParams;
using ortolan::cuda::kMostFewPairs;
using ortolan::cuda::kShortTokens;

// Plain fields of 8 bytes each, as custom_ops/queries.py declares them.
struct OrtolanDecodeScratchQuery {
  int64_t element;        // TensorProto.DataType
  int64_t cache_element;  // the same of caches
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t capacity;
  int64_t window;  // -1: none
  int64_t sink;
  int64_t max_sequences;  // of a step
  int64_t max_tokens;     // of a step
  int64_t num_multiprocessors;
  int64_t shared_bytes_per_block;
  int64_t compute_capability;  // 10 * major + minor
};

std::optional<ElementType> find_element(int64_t onnx) {
  for (const ElementType element : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16,
                                    ElementType::kInt8, ElementType::kFloat8E4M3})
    if (ortolan::facts_of(element).onnx == onnx) return element;
  return std::nullopt;
}

ortolan::cuda::Device device_of(const OrtolanDecodeScratchQuery& query) {
  ortolan::cuda::Device device;
  device.compute_capability = static_cast<int>(query.compute_capability);
  device.num_multiprocessors = static_cast<int>(query.num_multiprocessors);
  device.shared_bytes_per_block = static_cast<int>(query.shared_bytes_per_block);
  return device;
}

SwaAttentionParams params_of(const OrtolanDecodeScratchQuery& query, ElementType element,
                             ElementType cache_element) {
  SwaAttentionParams params{};
  params.element = element;
  params.cache_element = cache_element;
  params.num_heads = query.num_heads;
  params.cache.num_kv_heads = query.num_kv_heads;
  params.cache.head_size = query.head_size;
  params.cache.capacity = query.capacity;
  params.cache.sink = query.sink;
  params.window = query.window;
  return params;
}

}  // namespace

ORTOLAN_EXPORT int64_t ortolan_cuda_decode_scratch_query_bytes() { return sizeof(OrtolanDecodeScratchQuery); }

// Bytes that the largest of all steps asks for, in which every sequence has a token; -1 where no kernel
// computes in the element type.
//
// For tiles of as many rows, and from kShortTokens tokens on, the bytes rise with the tokens and with the
// sequences, but for one fall: behind kMostFewPairs tiles have fewer rows. So the largest steps of each size
// of tiles stand for all, beside the few steps of fewer tokens.
ORTOLAN_EXPORT int64_t ortolan_cuda_decode_scratch_bytes(const OrtolanDecodeScratchQuery* query) {
  const std::optional<ElementType> element = find_element(query->element);
  const std::optional<ElementType> cache_element = find_element(query->cache_element);
  if (!element || is_code(*element) || !cache_element) return -1;
  const ortolan::cuda::Device device = device_of(*query);
  SwaAttentionParams params = params_of(*query, *element, *cache_element);
  size_t most = 0;
  const auto take = [&](int64_t sequences, int64_t tokens) {
    params.packing.num_sequences = sequences;
    params.packing.num_tokens = tokens;
    most = std::max(most, ortolan::cuda::swa_attention_workspace(params, device));
  };
  const int64_t most_tokens = query->max_tokens;
  const int64_t most_sequences = std::min(query->max_sequences, most_tokens);
  for (int64_t tokens = 1; tokens <= std::min<int64_t>(most_tokens, kShortTokens); ++tokens)
    for (int64_t sequences = 1; sequences <= std::min(most_sequences, tokens); ++sequences)
      take(sequences, tokens);
  const int64_t before_fall = std::clamp<int64_t>(kMostFewPairs / query->num_kv_heads, 1, most_sequences);
  for (const int64_t sequences : {most_sequences, before_fall}) {
    take(sequences, most_tokens);
    // How many rows a tile has follows from the tokens that a sequence has on average, rounded up.
    for (int64_t each = 1; each <= kShortTokens; ++each) {
      take(sequences, std::min(most_tokens, sequences * each));
      take(std::clamp<int64_t>((most_tokens - 1) / each, 1, sequences), most_tokens);
      take(std::clamp<int64_t>((most_tokens + each - 1) / each, 1, sequences), most_tokens);
    }
  }
  return static_cast<int64_t>(most);
}
