"""Builds nodes of the operators in kernels/low_bit_expert_params.h; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`."""

from __future__ import annotations

import onnx

from ortolan.custom_ops.node import operator_node


def low_bit_experts(
    x: str,
    experts: str,
    weights: str,
    gate_up_codes: str,
    down_codes: str,
    gate_up_scales: str = "",
    gate_up_zero_points: str = "",
    gate_up_scale_codes: str = "",
    gate_up_float_scales: str = "",
    down_scales: str = "",
    down_zero_points: str = "",
    down_scale_codes: str = "",
    down_float_scales: str = "",
    gate_up_bias: str = "",
    down_bias: str = "",
    residual: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    format: str = "int4",
    group_size: int = 0,
    scale_rows: int = 1,
    activation: str = "silu_mul",
    limit: float = 7.0,
    alpha: float = 1.702,
) -> onnx.NodeProto:
    """Build a LowBitExperts node.

    MoeExperts over weights of few bits: each expert's gate_up [2 * I, H] and down [H, I] as LowBitLinear
    describes a weight, one behind the other; Gh = H / group_size and Gi = I / group_size groups, one if
    that is 0. Both have one format. Sums are float32; the inner rows and y are rounded to T1. Only the
    chosen experts' weights are read. Deterministic. A token's result does not depend on the other tokens,
    as long as one kernel family serves the step: on CUDA, steps of up to 32 * E pairs of token and expert
    have one, larger ones of 16-bit elements another, for which weights are rounded to T1; up to 3 / 2 * E
    pairs, int4 and mxfp4 have one of their own. All round each expert's share of y to T1. An expert outside
    0 .. E - 1 is refused on the CPU; on CUDA it adds nothing. Where docs/quantisation.md says so, inputs
    are rounded to 16 bits.

    Args:
        x: [T, H] T1. Rows of H features.
        experts: [T, K] tensor(int32). Experts of each token.
        weights: [T, K] tensor(float). Their weights.
        gate_up_codes: [E, 2 * I, H / 2] or [E, 2 * I, H] tensor(uint8). Codes of 4 or 8 bits of each
            expert's weight.
        down_codes: [E, H, I / 2] or [E, H, I] tensor(uint8). Codes of 4 or 8 bits of each expert's weight.
        gate_up_scales: [E, 2 * I, Gh] T1. int4, int8: a scale per group.
        gate_up_zero_points: [E, 2 * I, ceil(Gh / 2)] or [E, 2 * I, Gh] tensor(uint8). int4 (two in a byte),
            int8: a zero point per group.
        gate_up_scale_codes: [E, 2 * I, Gh] tensor(uint8). mxfp4, nvfp4: a scale per group.
        gate_up_float_scales: [E, ceil(2 * I / scale_rows), Gh] or [E, 2 * I, 1] tensor(float). fp8: a scale
            per block; nvfp4: one per row.
        down_scales: [E, H, Gi] T1. int4, int8: a scale per group.
        down_zero_points: [E, H, ceil(Gi / 2)] or [E, H, Gi] tensor(uint8). int4 (two in a byte), int8: a
            zero point per group.
        down_scale_codes: [E, H, Gi] tensor(uint8). mxfp4, nvfp4: a scale per group.
        down_float_scales: [E, ceil(H / scale_rows), Gi] or [E, H, 1] tensor(float). fp8: a scale per block;
            nvfp4: one per row.
        gate_up_bias: [E, 2 * I] T1. Added to the first product.
        down_bias: [E, H] T1. Added to the second product.
        residual: [T, H] T1. Added to the sum.
        outputs: names of y [T, H].
        name: name of the node.
        format: What codes and scales mean. Allowed: "int4", "int8", "fp8", "mxfp4" or "nvfp4".
        group_size: Columns that share a scale. Allowed: 0 (a whole row), or an even divisor of H and of I.
        scale_rows: fp8: rows that share a float scale. Allowed: 1 or more.
        activation: Gated activation. Allowed: "silu_mul", "gelu_mul" (erf), "gelu_tanh_mul" or
            "clamped_silu_mul".
        limit: Of clamped_silu_mul: bounds its inputs. Allowed: 0 or more.
        alpha: Of clamped_silu_mul: in its sigmoid. Allowed: any finite number.
    """
    inputs = (x, experts, weights, gate_up_codes, down_codes, gate_up_scales, gate_up_zero_points, gate_up_scale_codes, gate_up_float_scales, down_scales, down_zero_points, down_scale_codes, down_float_scales, gate_up_bias, down_bias, residual,)
    return operator_node("LowBitExperts", inputs, outputs, name, {"format": format, "group_size": group_size, "scale_rows": scale_rows, "activation": activation, "limit": limit, "alpha": alpha})
