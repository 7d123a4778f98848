// clang-format off
// The operators that have CUDA kernels; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`.
#include "kernels/cuda/operators.generated.h"

#include "cuda_operators.h"

namespace ortolan {

std::vector<OperatorKernel> cuda_operators() {
  return {
      cuda_operator<ops::RingKvAppend, cuda::ring_kv_append>(),
      cuda_operator<ops::SwaAttention, cuda::swa_attention, cuda::swa_attention_workspace>(),
      cuda_operator<ops::SnapKvCapture, cuda::snap_kv_capture>(),
      cuda_operator<ops::SnapKvScore, cuda::snap_kv_score, cuda::snap_kv_score_workspace>(),
      cuda_operator<ops::KvSelect, cuda::kv_select>(),
      cuda_operator<ops::KvCompact, cuda::kv_compact>(),
      cuda_operator<ops::MoeGate, cuda::moe_gate>(),
      cuda_operator<ops::MoeExperts, cuda::moe_experts, cuda::moe_experts_workspace>(),
      cuda_operator<ops::CausalConv, cuda::causal_conv>(),
      cuda_operator<ops::GatedDeltaRule, cuda::gated_delta_rule, cuda::gated_delta_rule_workspace>(),
      cuda_operator<ops::LowBitExperts, cuda::low_bit_experts, cuda::low_bit_experts_workspace>(),
      cuda_operator<ops::LowBitLinear, cuda::low_bit_linear, cuda::low_bit_linear_workspace>(),
      cuda_operator<ops::FusedLinear, cuda::fused_linear, cuda::fused_linear_workspace>(),
      cuda_operator<ops::QkvRopeAppend, cuda::qkv_rope_append>(),
      cuda_operator<ops::QkvAttention, cuda::qkv_attention, cuda::qkv_attention_workspace>(),
      cuda_operator<ops::NormRope, cuda::norm_rope>(),
      cuda_operator<ops::RopeAngles, cuda::rope_angles>(),
      cuda_operator<ops::GatherRows, cuda::gather_rows>(),
      cuda_operator<ops::NarrowStep, cuda::narrow_step>(),
      cuda_operator<ops::RmsNormAdd, cuda::rms_norm_add>(),
      cuda_operator<ops::GateMul, cuda::gate_mul>(),
      cuda_operator<ops::DeltaGates, cuda::delta_gates>(),
  };
}

}  // namespace ortolan
