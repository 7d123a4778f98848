// What operators do where a cache holds codes.
#pragma once

#include "kernels/cuda/common/kernels.h"

namespace ortolan::cuda {

// RingKvAppend of codes and scales.
cudaError_t append_codes(const RingKvAppendParams& params, const Launch& launch);

// Moves the scales of kept rows to the front, where there are any.
cudaError_t compact_scales(const KvCompactParams& params, const Launch& launch);

// Caches of codes as caches of compute elements: what the kernels for dense caches may read of them, in
// scratch memory. Of attention's sequences only those of more than `most_decode` new tokens are expanded, to
// a page each; the others need no room.
size_t expanded_bytes(const SwaAttentionParams& params, int most_decode);
cudaError_t expand_caches(SwaAttentionParams& params, Launch& launch, int most_decode);
size_t expanded_bytes(const SnapKvScoreParams& params);
cudaError_t expand_caches(SnapKvScoreParams& params, Launch& launch);

}  // namespace ortolan::cuda
