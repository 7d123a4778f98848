// The decode loop's device functions, and what kernels know of a device, as plain C symbols: for callers
// outside ONNX Runtime (ctypes).
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/sampling/logprobs.h"
#include "kernels/cuda/sampling/sampling.h"

#define ORTOLAN_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// The structs below have plain fields of 8 bytes each, as runtime/generate/device_library.py declares them;
// see cuda::DecodeAdvanceParams and cuda::TopLogprobsParams.
struct DecodeAdvance {
  int64_t device;
  const float* logits;
  ortolan::cuda::SamplingRule* rules;
  uint8_t* seen;
  int64_t num_sequences;
  int64_t vocab_size;
  int64_t random;
  int32_t* produced;
  int64_t* token_ids;
  int64_t* positions;
  int32_t* past_len;
  int32_t* kv_len;
  int64_t num_kv_lens;
  int64_t advance_tokens;
  void* workspace;
  cudaStream_t stream;
};

struct TopLogprobs {
  int64_t device;
  const float* logits;
  const int32_t* tokens;
  int64_t num_rows;
  int64_t vocab_size;
  int64_t k;
  int32_t* results;
  void* workspace;
  cudaStream_t stream;
};

ortolan::cuda::DecodeAdvanceParams params_of(const DecodeAdvance& step) {
  ortolan::cuda::DecodeAdvanceParams params{};
  params.logits = step.logits;
  params.rules = step.rules;
  params.seen = step.seen;
  params.num_sequences = step.num_sequences;
  params.vocab_size = step.vocab_size;
  params.random = step.random != 0;
  params.produced = step.produced;
  params.token_ids = step.token_ids;
  params.positions = step.positions;
  params.past_len = step.past_len;
  params.kv_len = step.kv_len;
  params.num_kv_lens = step.num_kv_lens;
  params.advance_tokens = static_cast<int32_t>(step.advance_tokens);
  params.workspace = step.workspace;
  return params;
}

ortolan::cuda::TopLogprobsParams params_of(const TopLogprobs& call) {
  ortolan::cuda::TopLogprobsParams params{};
  params.logits = call.logits;
  params.tokens = call.tokens;
  params.num_rows = call.num_rows;
  params.vocab_size = call.vocab_size;
  params.k = call.k;
  params.results = call.results;
  params.workspace = call.workspace;
  return params;
}

// Enqueues a call on its device and stream; the thread then forgets the error that is returned.
template <typename Call, typename Params>
int enqueue(const Call& call, cudaError_t (*launch)(const Params&, cudaStream_t)) {
  cudaError_t error = cudaSetDevice(static_cast<int>(call.device));
  if (error == cudaSuccess) error = launch(params_of(call), call.stream);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace

// Returns a cudaError_t.
ORTOLAN_EXPORT int ortolan_cuda_decode_advance(const DecodeAdvance* step) {
  return enqueue(*step, ortolan::cuda::decode_advance);
}

// Returns a cudaError_t.
ORTOLAN_EXPORT int ortolan_cuda_top_logprobs(const TopLogprobs* call) {
  return enqueue(*call, ortolan::cuda::top_logprobs);
}

// Bytes of the structs that callers fill.
ORTOLAN_EXPORT int64_t ortolan_cuda_decode_advance_bytes() { return sizeof(DecodeAdvance); }
ORTOLAN_EXPORT int64_t ortolan_cuda_sampling_rule_bytes() { return sizeof(ortolan::cuda::SamplingRule); }
ORTOLAN_EXPORT int64_t ortolan_cuda_top_logprobs_bytes() { return sizeof(TopLogprobs); }

// The compute capability that kernels are chosen by on the current device, 10 * major + minor; 0 where there
// is none. It is less than the device's own where the library holds only older code for it.
ORTOLAN_EXPORT int ortolan_cuda_compute_capability() {
  ortolan::cuda::Device device;
  const bool found = ortolan::cuda::current_device(device) == cudaSuccess;
  if (!found) cudaGetLastError();
  return found ? device.compute_capability : 0;
}

// Bytes of workspace for ortolan_cuda_decode_advance.
ORTOLAN_EXPORT int64_t ortolan_cuda_decode_workspace(int64_t num_sequences) {
  return static_cast<int64_t>(ortolan::cuda::decode_advance_workspace(num_sequences));
}

// Bytes of workspace for ortolan_cuda_top_logprobs.
ORTOLAN_EXPORT int64_t ortolan_cuda_logprobs_workspace(int64_t num_rows, int64_t vocab_size, int64_t k) {
  return static_cast<int64_t>(ortolan::cuda::top_logprobs_workspace(num_rows, vocab_size, k));
}

// Describes an error that one of these functions returned.
ORTOLAN_EXPORT const char* ortolan_cuda_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
