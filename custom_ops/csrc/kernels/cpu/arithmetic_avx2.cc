// The arithmetic kernels, built with the flags that this file's name stands for (see CMakeLists.txt).
#define ORTOLAN_ISA isa_avx2
#include "arithmetic.h"
#include "experts_impl.h"
#include "linear_impl.h"
#include "low_bit_experts_impl.h"
#include "qkv_impl.h"
#include "recurrent_impl.h"
#include "rows_impl.h"
#include "score_impl.h"

namespace ortolan::cpu {

const Arithmetic kArithmeticAvx2 = {
    isa_avx2::swa_attention,    isa_avx2::snap_kv_score,
    isa_avx2::moe_experts,      isa_avx2::causal_conv,
    isa_avx2::gated_delta_rule, isa_avx2::fused_linear,
    isa_avx2::qkv_rope_append,  isa_avx2::norm_rope,
    isa_avx2::rms_norm_add,     isa_avx2::gate_mul,
    isa_avx2::delta_gates,      {isa_avx2::low_bit_linear, isa_avx2::low_bit_experts}};

}  // namespace ortolan::cpu
