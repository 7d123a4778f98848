"""Builds nodes of the operators in kernels/low_bit_params.h; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`."""

from __future__ import annotations

import onnx

from ortolan.custom_ops.node import operator_node


def low_bit_linear(
    x: str,
    codes: str,
    scales: str = "",
    zero_points: str = "",
    scale_codes: str = "",
    float_scales: str = "",
    norm_weight: str = "",
    bias: str = "",
    residual: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    format: str = "int4",
    group_size: int = 0,
    scale_rows: int = 1,
    input_format: str = "none",
    input_scale: float = 0.0,
    epsilon: float = 1e-06,
    activation: str = "none",
) -> onnx.NodeProto:
    """Build a LowBitLinear node.

    FusedLinear over a weight [N, I] of few bits, N = O or 2 * O: y = residual + act(RMSNorm(x) @ weight^T +
    bias), in float32; the normalised rows and the result are rounded to T1. Groups are of group_size
    columns, G = I / group_size of them, one if that is 0. int4, int8: weight = (code - zero point) *
    scales, and a zero point is 8 or 128 where none are given. fp8: e4m3 code * float_scales, for scale_rows
    rows each. mxfp4: e2m1 code * 2^(scale_codes - 127), groups of 32. nvfp4: e2m1 code * e4m3 scale_codes *
    float_scales of the row, groups of 16. Codes of 4 bits lie two in a byte, the first in its low half.
    With input_format fp8 the rows, normalised where there is a norm, are rounded to e4m3, with a scale for
    each token and group: the group's largest magnitude / 448, and codes e4m3(x * (448 / largest)), 0 where
    all are 0; or codes e4m3(x * (1 / input_scale)), saturating, where that is given. Sums are then of
    products of codes, times both scales; tensor cores add up to 512 such products with about 14 bits before
    these join a float32 sum. One of the two outputs is asked for. A row's result does not depend on the
    other rows of a step of up to 8 rows, or of 9 to 16; on the CPU, on no other row. Where
    docs/quantisation.md says so, inputs are rounded to 16 bits.

    Args:
        x: [T, I] T1. Rows of I features.
        codes: [N, I / 2] or [N, I] tensor(uint8). Codes of 4 or 8 bits; MatMulNBits's, row by row.
        scales: [N, G] T1. int4, int8: a scale per group.
        zero_points: [N, ceil(G / 2)] or [N, G] tensor(uint8). int4 (two in a byte), int8: a zero point per
            group.
        scale_codes: [N, G] tensor(uint8). mxfp4, nvfp4: a scale per group.
        float_scales: [ceil(N / scale_rows), G] or [N, 1] tensor(float). fp8: a scale per block; nvfp4: one
            per row.
        norm_weight: [I] T1. Weight of an RMSNorm of x; absent: x is used as it is.
        bias: [N] T1. Added to the product.
        residual: [T, O] T1. Added to the result.
        outputs: names of y [T, O], y_float32 [T, O].
        name: name of the node.
        format: What codes and scales mean. Allowed: "int4", "int8", "fp8", "mxfp4" or "nvfp4".
        group_size: Columns that share a scale. Allowed: 0 (a whole row), or an even divisor of I.
        scale_rows: fp8: rows that share a float scale. Allowed: 1 or more.
        input_format: What inputs are rounded to before they are multiplied. Allowed: "none", or "fp8" where
            format is "fp8".
        input_scale: Scale of all rounded inputs. Allowed: 0 (a scale for each token and group), or more
            with input_format fp8.
        epsilon: Added to the mean square of an RMSNorm. Allowed: 0 or more.
        activation: Gated activation; the first O rows are the gate, the last O the factor. Allowed: "none",
            "silu_mul", "gelu_mul" (erf) or "gelu_tanh_mul".
    """
    inputs = (x, codes, scales, zero_points, scale_codes, float_scales, norm_weight, bias, residual,)
    return operator_node("LowBitLinear", inputs, outputs, name, {"format": format, "group_size": group_size, "scale_rows": scale_rows, "input_format": input_format, "input_scale": input_scale, "epsilon": epsilon, "activation": activation})
