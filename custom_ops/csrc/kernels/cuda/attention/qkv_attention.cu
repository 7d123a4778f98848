// QkvAttention on CUDA: one kernel for one token of one sequence (decode/token.cuh); else the kernel of
// QkvRopeAppend, then those of SwaAttention over the caches that it has written.
#include "decode/rows.cuh"
#include "instances.h"
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {
namespace {

// Whether the step has the form that token.cuh is written for.
bool is_token(const QkvAttentionParams& p, const Device& device) {
  const SwaAttentionParams& attention = p.attention;
  const CacheLayout& cache = attention.cache;
  return device.compute_capability == 90 && attention.packing.num_sequences == 1 &&
         attention.packing.num_tokens == 1 && attention.element != ElementType::kFloat32 &&
         attention.cache_element == attention.element &&
         attention.num_heads <= cache.num_kv_heads * kDecodeTileRows && !attention.prefix_end &&
         p.heads.rotary_pairs % 8 == 0 &&
         vector_bytes(16, {p.heads.qkv, p.heads.query_norm_weight, p.heads.key_norm_weight, p.heads.cosine,
                           p.heads.sine, p.heads.query, p.heads.key_cache, p.heads.value_cache,
                           p.heads.capture}) == 16;
}

// False, and nothing launched, where other kernels must take the step.
bool launch_as_token(const QkvAttentionParams& p, const Launch& launch, cudaError_t& error) {
  if (!is_token(p, launch.device)) return false;
  return with_half_element(p.attention.element, [&]<typename Element>() {
    switch (p.attention.cache.head_size) {
      case 64:
        return launch_token<DenseRows<Element, 64>>(p, launch, error);
      case 128:
        return launch_token<DenseRows<Element, 128>>(p, launch, error);
      case 256:
        return launch_token<DenseRows<Element, 256>>(p, launch, error);
      default:
        return false;
    }
  });
}

}  // namespace

size_t qkv_attention_workspace(const QkvAttentionParams& params, const Device& device) {
  return swa_attention_workspace(params.attention, device);
}

cudaError_t qkv_attention(const QkvAttentionParams& params, const Launch& launch) {
  if (vector_bytes(16, {params.attention.output}) < 16) return cudaErrorMisalignedAddress;
  cudaError_t error = cudaSuccess;
  if (launch_as_token(params, launch, error)) return error;
  error = qkv_rope_append(params.heads, launch);
  return error != cudaSuccess ? error : swa_attention(params.attention, launch);
}

}  // namespace ortolan::cuda
