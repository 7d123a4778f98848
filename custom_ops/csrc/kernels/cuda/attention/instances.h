// Attention's kernel templates, as declarations: each is instantiated in a source file of its own.
#pragma once

#include "kernels/cuda/common/kernels.h"

namespace ortolan::cuda {

template <typename Element, int kHeadSize>
cudaError_t launch_mma_prefill(const SwaAttentionParams& params, const Launch& launch, int most_decode);

template <typename Element, int kHeadSize, int kKeyRows>
cudaError_t launch_sm90_prefill(const SwaAttentionParams& params, const Launch& launch, int most_decode);

template <typename Rows, int kRowTiles>
cudaError_t launch_decode(const SwaAttentionParams& params, const Launch& launch);
template <typename Rows, int kRowTiles>
size_t decode_workspace_bytes(const SwaAttentionParams& params, const Device& device);

template <typename Element, int kHeadSize>
cudaError_t launch_sm90_decode(const SwaAttentionParams& params, const Launch& launch);
template <typename Element, int kHeadSize>
size_t sm90_decode_workspace_bytes(const SwaAttentionParams& params, const Device& device);

}  // namespace ortolan::cuda
