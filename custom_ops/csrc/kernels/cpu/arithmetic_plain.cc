// The arithmetic kernels, built with the flags that this file's name stands for (see CMakeLists.txt).
#define ORTOLAN_ISA isa_plain
#include "arithmetic.h"
#include "experts_impl.h"
#include "linear_impl.h"
#include "low_bit_experts_impl.h"
#include "qkv_impl.h"
#include "recurrent_impl.h"
#include "rows_impl.h"
#include "score_impl.h"

namespace ortolan::cpu {

const Arithmetic kArithmeticPlain = {
    isa_plain::swa_attention,    isa_plain::snap_kv_score,
    isa_plain::moe_experts,      isa_plain::causal_conv,
    isa_plain::gated_delta_rule, isa_plain::fused_linear,
    isa_plain::qkv_rope_append,  isa_plain::norm_rope,
    isa_plain::rms_norm_add,     isa_plain::gate_mul,
    isa_plain::delta_gates,      {isa_plain::low_bit_linear, isa_plain::low_bit_experts}};

}  // namespace ortolan::cpu
