// The arithmetic kernels, built with the flags that this file's name stands for (see CMakeLists.txt).
#define ORTOLAN_ISA isa_avx512
#include "arithmetic.h"
#include "experts_impl.h"
#include "linear_impl.h"
#include "low_bit_experts_impl.h"
#include "qkv_impl.h"
#include "recurrent_impl.h"
#include "rows_impl.h"
#include "score_impl.h"

namespace ortolan::cpu {

const Arithmetic kArithmeticAvx512 = {
    isa_avx512::swa_attention,    isa_avx512::snap_kv_score,
    isa_avx512::moe_experts,      isa_avx512::causal_conv,
    isa_avx512::gated_delta_rule, isa_avx512::fused_linear,
    isa_avx512::qkv_rope_append,  isa_avx512::norm_rope,
    isa_avx512::rms_norm_add,     isa_avx512::gate_mul,
    isa_avx512::delta_gates,      {isa_avx512::low_bit_linear, isa_avx512::low_bit_experts}};

}  // namespace ortolan::cpu
