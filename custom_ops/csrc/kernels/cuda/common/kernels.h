// Where CUDA kernels run, and the kernel families behind attention. Each entry point enqueues on a stream and
// returns the launch's error; those of the operators are in operators.generated.h.
//
// Lengths, row boundaries and block tables are read on the device: a captured graph stays right as they
// change. No launch synchronises, allocates, or depends on a length; sizes and shapes are all the host knows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/params.h"

namespace ortolan::cuda {

// What kernels ask of a device, read once.
struct Device {
  int ordinal = 0;
  int compute_capability = 0;  // 10 * major + minor, or less where the library's code for it is older
  int num_multiprocessors = 0;
  int shared_bytes_per_block = 0;  // the opt-in limit
};

// The device that is current on this thread.
cudaError_t current_device(Device& device);

// Counters that a launch may use; the scratch memory behind them is aligned.
constexpr int kCounters = 4096;

// Where a launch goes, and the scratch memory it may use until the stream passes it.
struct Launch {
  Device device;
  cudaStream_t stream = nullptr;
  void* workspace = nullptr;  // 256-byte aligned, not initialised
  size_t workspace_bytes = 0;
  unsigned* counters = nullptr;  // [kCounters], where there is a workspace: zero before and after each kernel
  bool is_behind = false;        // behind another kernel of the step, whose blocks begin with a wait
};

// Bytes of a part of the workspace, such that the next one is aligned like the first.
inline int64_t aligned_bytes(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// A sequence with at most this many new tokens belongs to a decode kernel; one with more, to prefill's, of
// which one is for short chunks. Steps of as many tokens as sequences are decode's alone (decode_tokens).
constexpr int kDecodeTokens = 16, kShortTokens = 64;

// Which sequences of a step are a kernel's: by their own tokens in it.
struct OwnTokens {
  int more_than = 0;
  int at_most = 1 << 30;

  ORTOLAN_HOST_DEVICE bool hold(int tokens) const { return tokens > more_than && tokens <= at_most; }
};

// Query rows (token, head of a group) of a tile of the decode kernel's products; one pass takes a tile or
// two.
constexpr int kDecodeTileRows = 8;
constexpr int kSm90DecodeRows = 64;  // of one product by wgmma
// Sequences times kv heads, at most, where heads of up to 256 columns take such products.
constexpr int64_t kMostFewPairs = 2048;

// The kernel families behind swa_attention: every sequence goes to the decode kernel or to a prefill kernel
// by its own token count, so that what a sequence gets does not depend on what else is in the batch. Each
// handles the sequences that are its own and leaves the output rows of the others alone.
cudaError_t attention_decode(const SwaAttentionParams& params, const Launch& launch);
size_t attention_decode_workspace(const SwaAttentionParams& params, const Device& device);
// `most_decode`: tokens of a sequence that decode takes, at most.
cudaError_t attention_prefill_mma(const SwaAttentionParams& params, const Launch& launch, int most_decode);
bool attention_prefill_sm90_takes(const SwaAttentionParams& params, const Device& device);
cudaError_t attention_prefill_sm90(const SwaAttentionParams& params, const Launch& launch, int most_decode);
size_t attention_prefill_sm90_workspace(const SwaAttentionParams& params, const Device& device,
                                        int most_decode);
// float32 on the CUDA cores, for any number of tokens.
cudaError_t attention_float32(const SwaAttentionParams& params, const Launch& launch);

}  // namespace ortolan::cuda
