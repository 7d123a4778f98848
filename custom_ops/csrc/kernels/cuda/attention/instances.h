// Attention's kernel templates, as declarations: each is instantiated in a source file of its own.
#pragma once

#include <algorithm>

#include "kernels/cuda/common/kernels.h"
#include "kernels/qkv_params.h"

namespace ortolan::cuda {

// New tokens of a sequence, at most, as far as the host can be sure.
inline int64_t most_new_tokens(const SwaAttentionParams& params) {
  const int64_t tokens = params.packing.num_tokens, promised = params.max_query_len;
  return promised > 0 ? std::min(tokens, promised) : tokens;
}

// Query rows that a sequence is expected to bring for each kv head, in whole eights; one that brings more
// takes several entries.
inline int expected_rows(const SwaAttentionParams& params, int64_t most_tokens) {
  const int64_t sequences = std::max<int64_t>(params.packing.num_sequences, 1);
  const int64_t tokens =
      std::min<int64_t>((params.packing.num_tokens + sequences - 1) / sequences, most_tokens);
  const int64_t rows = params.num_heads / params.cache.num_kv_heads * tokens;
  constexpr int64_t kTile = kDecodeTileRows;
  return static_cast<int>(std::min<int64_t>((rows + kTile - 1) / kTile * kTile, kSm90DecodeRows));
}

// New tokens of a sequence that decode takes, at most; `most`: in steps of more tokens than sequences. As
// many tokens as sequences are one for each, and no other kernel need be launched; where some sequences have
// none, the others may have more than `most`.
inline int decode_tokens(const SwaAttentionParams& params, int most) {
  const Packing& packing = params.packing;
  return packing.num_tokens == packing.num_sequences ? std::max(most, static_cast<int>(packing.num_tokens))
                                                     : most;
}

template <typename Element, int kHeadSize>
cudaError_t launch_mma_prefill(const SwaAttentionParams& params, const Launch& launch, int most_decode);

template <typename Element, int kHeadSize, int kKeyRows>
cudaError_t launch_sm90_prefill(const SwaAttentionParams& params, const Launch& launch, const OwnTokens& own);
template <typename Element, int kHeadSize, int kKeyRows>
cudaError_t launch_sm90_short(const SwaAttentionParams& params, const Launch& launch, const OwnTokens& own);
template <typename Element, int kHeadSize, int kKeyRows>
size_t sm90_short_workspace_bytes(const SwaAttentionParams& params, const Device& device,
                                  const OwnTokens& own);

template <typename Rows, int kRowTiles>
cudaError_t launch_decode(const SwaAttentionParams& params, const Launch& launch);
template <typename Rows, int kRowTiles>
size_t decode_workspace_bytes(const SwaAttentionParams& params, const Device& device);

// Rows of decode attention by wgmma: in the order of sums of DenseRows, or in one of their own.
template <typename Element, int kHeadSize, int kRows>
struct Sm90FewRows;
template <typename Element, int kHeadSize, int kRows>
struct Sm90WideRows;

// False, and nothing launched, where other kernels must take the step.
template <typename Rows>
bool launch_token(const QkvAttentionParams& params, const Launch& launch, cudaError_t& error);

template <typename Rows>
cudaError_t launch_sm90_decode(const SwaAttentionParams& params, const Launch& launch);
template <typename Rows>
size_t sm90_decode_workspace_bytes(const SwaAttentionParams& params, const Device& device);

}  // namespace ortolan::cuda
