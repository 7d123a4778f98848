// Chooses, at run time, the instruction set that the arithmetic kernels use.
#include "arithmetic.h"

#include <atomic>

namespace ortolan::cpu {
namespace {

Isa detect() {
#if defined(ORTOLAN_X86_64)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512vnni")) return Isa::kAvx512Vnni;
  return avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kPlain;
#else
  return Isa::kPlain;
#endif
}

std::atomic<Isa>& chosen_isa() {
  static std::atomic<Isa> isa{detect()};
  return isa;
}

const Arithmetic& arithmetic() {
#if defined(ORTOLAN_X86_64)
  switch (chosen_isa().load(std::memory_order_relaxed)) {
    case Isa::kAvx512Vnni:
    case Isa::kAvx512:
      return kArithmeticAvx512;
    case Isa::kAvx2:
      return kArithmeticAvx2;
    case Isa::kPlain:
      break;
  }
#endif
  return kArithmeticPlain;
}

const LowBitArithmetic& low_bit_arithmetic() {
#if defined(ORTOLAN_X86_64)
  if (chosen_isa().load(std::memory_order_relaxed) == Isa::kAvx512Vnni) return kLowBitAvx512Vnni;
#endif
  return arithmetic().low_bit;
}

}  // namespace

bool limit_isa(Isa isa) {
  if (isa > detect()) return false;
  chosen_isa().store(isa, std::memory_order_relaxed);
  return true;
}

bool reads_past_caches() {
#if defined(ORTOLAN_X86_64)
  static const bool is_amd = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
  return is_amd;
#else
  return false;
#endif
}

void swa_attention(const SwaAttentionParams& params, ParallelFor& parallel) {
  arithmetic().swa_attention(params, parallel);
}

void snap_kv_score(const SnapKvScoreParams& params, ParallelFor& parallel) {
  arithmetic().snap_kv_score(params, parallel);
}

void moe_experts(const MoeExpertsParams& params, ParallelFor& parallel) {
  arithmetic().moe_experts(params, parallel);
}

void causal_conv(const CausalConvParams& params, ParallelFor& parallel) {
  arithmetic().causal_conv(params, parallel);
}

void gated_delta_rule(const GatedDeltaRuleParams& params, ParallelFor& parallel) {
  arithmetic().gated_delta_rule(params, parallel);
}

void fused_linear(const FusedLinearParams& params, ParallelFor& parallel) {
  arithmetic().fused_linear(params, parallel);
}

void qkv_rope_append(const QkvRopeAppendParams& params, ParallelFor& parallel) {
  arithmetic().qkv_rope_append(params, parallel);
}

void qkv_attention(const QkvAttentionParams& params, ParallelFor& parallel) {
  qkv_rope_append(params.heads, parallel);
  swa_attention(params.attention, parallel);
}

void norm_rope(const NormRopeParams& params, ParallelFor& parallel) {
  arithmetic().norm_rope(params, parallel);
}

void rms_norm_add(const RmsNormAddParams& params, ParallelFor& parallel) {
  arithmetic().rms_norm_add(params, parallel);
}

void gate_mul(const GateMulParams& params, ParallelFor& parallel) { arithmetic().gate_mul(params, parallel); }

void delta_gates(const DeltaGatesParams& params, ParallelFor& parallel) {
  arithmetic().delta_gates(params, parallel);
}

void low_bit_linear(const LowBitLinearParams& params, ParallelFor& parallel) {
  low_bit_arithmetic().linear(params, parallel);
}

void low_bit_experts(const LowBitExpertsParams& params, ParallelFor& parallel) {
  low_bit_arithmetic().experts(params, parallel);
}

}  // namespace ortolan::cpu
