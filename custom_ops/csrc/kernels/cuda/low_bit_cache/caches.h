// What operators do where a cache holds codes.
#pragma once

#include "kernels/cuda/common/kernels.h"

namespace ortolan::cuda {

// RingKvAppend of codes and scales.
cudaError_t append_codes(const RingKvAppendParams& params, const Launch& launch);

// Moves the scales of kept rows to the front, where there are any.
cudaError_t compact_scales(const KvCompactParams& params, const Launch& launch);

// Caches of codes as caches of compute elements: the slots that hold something, in scratch memory
// [B, Hkv, C, D], where sequence b owns page b. Kernels for dense caches then do the rest.
size_t expanded_bytes(const SwaAttentionParams& params);
cudaError_t expand_caches(SwaAttentionParams& params, Launch& launch);
size_t expanded_bytes(const SnapKvScoreParams& params);
cudaError_t expand_caches(SnapKvScoreParams& params, Launch& launch);

}  // namespace ortolan::cuda
