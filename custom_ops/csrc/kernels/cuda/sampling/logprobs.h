// Says how likely tokens are: log-softmax of raw logits, on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace ortolan::cuda {

constexpr int64_t kMaxLogprobs = 64;

struct TopLogprobsParams {
  const float* logits;    // [R, V]
  const int32_t* tokens;  // [R], device or mapped host memory; a token outside the vocabulary gets NaN
  int64_t num_rows;       // R
  int64_t vocab_size;     // V
  int64_t k;              // best tokens of each row, at most V and kMaxLogprobs
  int32_t* results;       // [R, 2 + 2k], device or mapped host memory. Bits of float32: log-sum-exp, the
                          // token's log-probability, those of the k best, best first; then their k ids
  void* workspace;        // top_logprobs_workspace bytes, of any content; 256-byte aligned
};

// Of equal logits the lower id comes first. Returns cudaErrorInvalidValue where k is out of range.
cudaError_t top_logprobs(const TopLogprobsParams& params, cudaStream_t stream);
size_t top_logprobs_workspace(int64_t num_rows, int64_t vocab_size, int64_t k);

}  // namespace ortolan::cuda
