// SnapKvScore's kernel templates, as declarations: each is instantiated in a source file of its own.
#pragma once

#include "kernels/cuda/common/kernels.h"

namespace ortolan::cuda {

struct ScorePlan;

template <typename Element, int kHeadSize>
cudaError_t launch_score(const SnapKvScoreParams& p, const Launch& launch);
template <typename Element, int kHeadSize>
size_t score_workspace_bytes(const SnapKvScoreParams& p);

// For 16-bit elements and head sizes 64 and 128, on sm_90.
template <typename Element, int kHeadSize>
cudaError_t launch_score_sm90(const SnapKvScoreParams& p, const Launch& launch);
template <typename Element, int kHeadSize>
size_t score_sm90_workspace_bytes(const SnapKvScoreParams& p);

// Merges the spans' states.
cudaError_t launch_score_fold(const SnapKvScoreParams& p, const ScorePlan& plan, const Launch& launch);

}  // namespace ortolan::cuda
