// The kernels that are built once for each instruction set.
#pragma once

#include "isa.h"
#include "kernels/cpu/operators.generated.h"

namespace ortolan::cpu {

struct LowBitArithmetic {
  void (*linear)(const LowBitLinearParams&, ParallelFor&);
  void (*experts)(const LowBitExpertsParams&, ParallelFor&);
};

struct Arithmetic {
  void (*swa_attention)(const SwaAttentionParams&, ParallelFor&);
  void (*snap_kv_score)(const SnapKvScoreParams&, ParallelFor&);
  void (*moe_experts)(const MoeExpertsParams&, ParallelFor&);
  void (*causal_conv)(const CausalConvParams&, ParallelFor&);
  void (*gated_delta_rule)(const GatedDeltaRuleParams&, ParallelFor&);
  void (*fused_linear)(const FusedLinearParams&, ParallelFor&);
  void (*qkv_rope_append)(const QkvRopeAppendParams&, ParallelFor&);
  void (*norm_rope)(const NormRopeParams&, ParallelFor&);
  void (*rms_norm_add)(const RmsNormAddParams&, ParallelFor&);
  void (*gate_mul)(const GateMulParams&, ParallelFor&);
  void (*delta_gates)(const DeltaGatesParams&, ParallelFor&);
  LowBitArithmetic low_bit;
};

extern const Arithmetic kArithmeticPlain;
#if defined(ORTOLAN_X86_64)
extern const Arithmetic kArithmeticAvx2;
extern const Arithmetic kArithmeticAvx512;
extern const LowBitArithmetic kLowBitAvx512Vnni;
#endif

}  // namespace ortolan::cpu
