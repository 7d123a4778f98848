// Chooses each sequence's next token from its logits and advances the decode state, all on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace ortolan::cuda {

// How one sequence draws; an array [B] of these lies in device memory.
struct SamplingRule {
  double tail_mass;           // 1 - top_p: the share of probability that may be dropped
  uint64_t seed;              // of the random numbers
  uint64_t draw;              // position of the token to choose; each choice adds 1
  float inverse_temperature;  // infinity: the most likely token
  float min_p;                // 0: keep all
  float repetition_penalty;   // 1: none
  int32_t top_k;              // 0: keep all
};

struct DecodeAdvanceParams {
  const float* logits;    // [B, V]
  SamplingRule* rules;    // [B], or null: most likely token, no penalty
  uint8_t* seen;          // [B, V], 1 where the sequence holds the token; null without a penalty
  int64_t num_sequences;  // B
  int64_t vocab_size;     // V
  bool random;            // draw by the rules instead of taking the most likely token
  int32_t* produced;      // [B], device or mapped host memory; -1 where a logit is NaN or infinite
  int64_t* token_ids;     // [B] or null; 0 where produced is -1
  int64_t* positions;     // [B] or null
  int32_t* past_len;      // [B] or null
  int32_t* kv_len;        // [num_kv_lens] or null
  int64_t num_kv_lens;
  int32_t advance_tokens;  // added to positions, past_len and kv_len
  void* workspace;         // zeroed once by its owner; 256-byte aligned
};

cudaError_t decode_advance(const DecodeAdvanceParams& params, cudaStream_t stream);
size_t decode_advance_workspace(int64_t num_sequences);

}  // namespace ortolan::cuda
