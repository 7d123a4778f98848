// QkvAttention on CUDA: the kernel of QkvRopeAppend, then those of SwaAttention over the caches that it has
// written.
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {

size_t qkv_attention_workspace(const QkvAttentionParams& params, const Device& device) {
  return swa_attention_workspace(params.attention, device);
}

cudaError_t qkv_attention(const QkvAttentionParams& params, const Launch& launch) {
  if (vector_bytes(16, {params.attention.output}) < 16) return cudaErrorMisalignedAddress;
  if (const cudaError_t error = qkv_rope_append(params.heads, launch); error != cudaSuccess) return error;
  return swa_attention(params.attention, launch);
}

}  // namespace ortolan::cuda
