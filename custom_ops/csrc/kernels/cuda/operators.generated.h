// clang-format off
// The kernels of the operators, whose arguments are valid; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`.
#pragma once

#include "kernels/expert_params.h"
#include "kernels/fused_params.h"
#include "kernels/gate_params.h"
#include "kernels/low_bit_expert_params.h"
#include "kernels/low_bit_params.h"
#include "kernels/params.h"
#include "kernels/qkv_params.h"
#include "kernels/recurrent_params.h"
#include "common/kernels.h"

namespace ortolan::cuda {

cudaError_t ring_kv_append(const RingKvAppendParams& params, const Launch& launch);
cudaError_t swa_attention(const SwaAttentionParams& params, const Launch& launch);
size_t swa_attention_workspace(const SwaAttentionParams& params, const Device& device);
cudaError_t snap_kv_capture(const SnapKvCaptureParams& params, const Launch& launch);
cudaError_t snap_kv_score(const SnapKvScoreParams& params, const Launch& launch);
size_t snap_kv_score_workspace(const SnapKvScoreParams& params, const Device& device);
cudaError_t kv_select(const KvSelectParams& params, const Launch& launch);
cudaError_t kv_compact(const KvCompactParams& params, const Launch& launch);
cudaError_t moe_gate(const MoeGateParams& params, const Launch& launch);
cudaError_t moe_experts(const MoeExpertsParams& params, const Launch& launch);
size_t moe_experts_workspace(const MoeExpertsParams& params, const Device& device);
cudaError_t causal_conv(const CausalConvParams& params, const Launch& launch);
cudaError_t gated_delta_rule(const GatedDeltaRuleParams& params, const Launch& launch);
size_t gated_delta_rule_workspace(const GatedDeltaRuleParams& params, const Device& device);
cudaError_t low_bit_experts(const LowBitExpertsParams& params, const Launch& launch);
size_t low_bit_experts_workspace(const LowBitExpertsParams& params, const Device& device);
cudaError_t low_bit_linear(const LowBitLinearParams& params, const Launch& launch);
size_t low_bit_linear_workspace(const LowBitLinearParams& params, const Device& device);
cudaError_t fused_linear(const FusedLinearParams& params, const Launch& launch);
size_t fused_linear_workspace(const FusedLinearParams& params, const Device& device);
cudaError_t qkv_rope_append(const QkvRopeAppendParams& params, const Launch& launch);
cudaError_t qkv_attention(const QkvAttentionParams& params, const Launch& launch);
size_t qkv_attention_workspace(const QkvAttentionParams& params, const Device& device);
cudaError_t norm_rope(const NormRopeParams& params, const Launch& launch);
cudaError_t rope_angles(const RopeAnglesParams& params, const Launch& launch);
cudaError_t gather_rows(const GatherRowsParams& params, const Launch& launch);
cudaError_t narrow_step(const NarrowStepParams& params, const Launch& launch);
cudaError_t rms_norm_add(const RmsNormAddParams& params, const Launch& launch);
cudaError_t gate_mul(const GateMulParams& params, const Launch& launch);
cudaError_t delta_gates(const DeltaGatesParams& params, const Launch& launch);

}  // namespace ortolan::cuda
