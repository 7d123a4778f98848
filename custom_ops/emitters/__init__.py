"""Builds nodes of Ortolan's operators; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`."""

from ortolan.custom_ops.emitters.cache import (
    kv_compact,
    kv_select,
    ring_kv_append,
    snap_kv_capture,
    snap_kv_score,
    swa_attention,
)
from ortolan.custom_ops.emitters.expert import (
    moe_experts,
    moe_gate,
)
from ortolan.custom_ops.emitters.fused import (
    fused_linear,
    gather_rows,
    narrow_step,
    rms_norm_add,
    rope_angles,
)
from ortolan.custom_ops.emitters.gate import (
    delta_gates,
    gate_mul,
)
from ortolan.custom_ops.emitters.low_bit import (
    low_bit_linear,
)
from ortolan.custom_ops.emitters.low_bit_expert import (
    low_bit_experts,
)
from ortolan.custom_ops.emitters.qkv import (
    norm_rope,
    qkv_attention,
    qkv_rope_append,
)
from ortolan.custom_ops.emitters.recurrent import (
    causal_conv,
    gated_delta_rule,
)

__all__ = [
    "causal_conv",
    "delta_gates",
    "fused_linear",
    "gate_mul",
    "gated_delta_rule",
    "gather_rows",
    "kv_compact",
    "kv_select",
    "low_bit_experts",
    "low_bit_linear",
    "moe_experts",
    "moe_gate",
    "narrow_step",
    "norm_rope",
    "qkv_attention",
    "qkv_rope_append",
    "ring_kv_append",
    "rms_norm_add",
    "rope_angles",
    "snap_kv_capture",
    "snap_kv_score",
    "swa_attention",
]
