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
#include "parallel.h"

namespace ortolan::cpu {

void ring_kv_append(const RingKvAppendParams& params, ParallelFor& parallel);
void swa_attention(const SwaAttentionParams& params, ParallelFor& parallel);
void snap_kv_capture(const SnapKvCaptureParams& params, ParallelFor& parallel);
void snap_kv_score(const SnapKvScoreParams& params, ParallelFor& parallel);
void kv_select(const KvSelectParams& params, ParallelFor& parallel);
void kv_compact(const KvCompactParams& params, ParallelFor& parallel);
void moe_gate(const MoeGateParams& params, ParallelFor& parallel);
void moe_experts(const MoeExpertsParams& params, ParallelFor& parallel);
void causal_conv(const CausalConvParams& params, ParallelFor& parallel);
void gated_delta_rule(const GatedDeltaRuleParams& params, ParallelFor& parallel);
void low_bit_experts(const LowBitExpertsParams& params, ParallelFor& parallel);
void low_bit_linear(const LowBitLinearParams& params, ParallelFor& parallel);
void fused_linear(const FusedLinearParams& params, ParallelFor& parallel);
void qkv_rope_append(const QkvRopeAppendParams& params, ParallelFor& parallel);
void qkv_attention(const QkvAttentionParams& params, ParallelFor& parallel);
void norm_rope(const NormRopeParams& params, ParallelFor& parallel);
void rope_angles(const RopeAnglesParams& params, ParallelFor& parallel);
void gather_rows(const GatherRowsParams& params, ParallelFor& parallel);
void narrow_step(const NarrowStepParams& params, ParallelFor& parallel);
void rms_norm_add(const RmsNormAddParams& params, ParallelFor& parallel);
void gate_mul(const GateMulParams& params, ParallelFor& parallel);
void delta_gates(const DeltaGatesParams& params, ParallelFor& parallel);

}  // namespace ortolan::cpu
