// clang-format off
// The operators that have CPU kernels; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`.
#include "kernels/cpu/operators.generated.h"

#include "cpu_operators.h"

namespace ortolan {

std::vector<OperatorKernel> cpu_operators() {
  return {
      cpu_operator<ops::RingKvAppend, cpu::ring_kv_append>(),
      cpu_operator<ops::SwaAttention, cpu::swa_attention>(),
      cpu_operator<ops::SnapKvCapture, cpu::snap_kv_capture>(),
      cpu_operator<ops::SnapKvScore, cpu::snap_kv_score>(),
      cpu_operator<ops::KvSelect, cpu::kv_select>(),
      cpu_operator<ops::KvCompact, cpu::kv_compact>(),
      cpu_operator<ops::MoeGate, cpu::moe_gate>(),
      cpu_operator<ops::MoeExperts, cpu::moe_experts>(),
      cpu_operator<ops::CausalConv, cpu::causal_conv>(),
      cpu_operator<ops::GatedDeltaRule, cpu::gated_delta_rule>(),
      cpu_operator<ops::LowBitExperts, cpu::low_bit_experts>(),
      cpu_operator<ops::LowBitLinear, cpu::low_bit_linear>(),
      cpu_operator<ops::FusedLinear, cpu::fused_linear>(),
      cpu_operator<ops::QkvRopeAppend, cpu::qkv_rope_append>(),
      cpu_operator<ops::QkvAttention, cpu::qkv_attention>(),
      cpu_operator<ops::NormRope, cpu::norm_rope>(),
      cpu_operator<ops::RopeAngles, cpu::rope_angles>(),
      cpu_operator<ops::GatherRows, cpu::gather_rows>(),
      cpu_operator<ops::NarrowStep, cpu::narrow_step>(),
      cpu_operator<ops::RmsNormAdd, cpu::rms_norm_add>(),
      cpu_operator<ops::GateMul, cpu::gate_mul>(),
      cpu_operator<ops::DeltaGates, cpu::delta_gates>(),
  };
}

}  // namespace ortolan
