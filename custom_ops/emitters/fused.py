"""Builds nodes of the operators in kernels/fused_params.h; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`."""

from __future__ import annotations

import onnx

from ortolan.custom_ops.node import operator_node


def fused_linear(
    x: str,
    weight: str,
    norm_weight: str = "",
    bias: str = "",
    residual: str = "",
    factor: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    epsilon: float = 1e-06,
    activation: str = "none",
    factor_offset: int = 0,
    batch_invariant: int = 0,
) -> onnx.NodeProto:
    """Build a FusedLinear node.

    A linear layer with what stands around it: y = residual + act(RMSNorm(x) @ weight^T + bias), in float32;
    the normalised rows and the result are rounded to T1. With a gated activation the first O rows of weight
    and bias are the gate, the last O the factor: act(gate) * factor. Or all rows are the gate, and the
    factor is an input. One of the two outputs is asked for. In a step of many tokens that asks for y, the
    product too is rounded to T1 before its bias and its gate. Up to 8 rows get the same bits whatever their
    number: in float32, and on compute capability 9.0 in 16 bits where a row of weight has 2 to 32 KB.

    Args:
        x: [T, I] T1. Rows of I features.
        weight: [O, I] or [2 * O, I] T1. Weight; 2 * O rows if gated without a factor.
        norm_weight: [I] T1. Weight of an RMSNorm of x; absent: x is used as it is.
        bias: [O] or [2 * O] T1. Added to the product.
        residual: [T, O] T1. Added to the result.
        factor: [T, X] T1. Rows that hold the factor of a gated activation; not with a residual. Absent:
            weight gives the factor.
        outputs: names of y [T, O], y_float32 [T, O].
        name: name of the node.
        epsilon: Added to the mean square of an RMSNorm. Allowed: 0 or more.
        activation: Gated activation. Allowed: "none", "silu_mul", "gelu_mul" (erf) or "gelu_tanh_mul".
        factor_offset: With factor: its first column. Allowed: 0 or more.
        batch_invariant: 1: a row of the result has the same bits whatever rows stand beside it, and however
            many. Allowed: 0 or 1.
    """
    inputs = (x, weight, norm_weight, bias, residual, factor,)
    return operator_node("FusedLinear", inputs, outputs, name, {"epsilon": epsilon, "activation": activation, "factor_offset": factor_offset, "batch_invariant": batch_invariant})


def rope_angles(
    positions: str,
    inv_freq: str,
    *,
    outputs: tuple[str, ...],
    name: str,
    factor: float = 1.0,
) -> onnx.NodeProto:
    """Build a RopeAngles node.

    Cosines and sines of RoPE: cosine = factor * cos(positions * inv_freq), in float32, and sine likewise.

    Args:
        positions: [T] tensor(int64). Logical position of each token.
        inv_freq: [1, R] tensor(float). Radians per position of each rotated pair.
        outputs: names of cosine [1, T, R], sine [1, T, R].
        name: name of the node.
        factor: Multiplies cosine and sine. Allowed: any finite number.
    """
    inputs = (positions, inv_freq,)
    return operator_node("RopeAngles", inputs, outputs, name, {"factor": factor})


def gather_rows(
    rows: str,
    row_indices: str,
    *,
    outputs: tuple[str, ...],
    name: str,
) -> onnx.NodeProto:
    """Build a GatherRows node.

    Some rows, by their indices: output[r] = rows[row_indices[r]], and zeros where an index is not in 0 .. T
    - 1.

    Args:
        rows: [T, H] T1. Packed rows of H features.
        row_indices: [R] tensor(int64). Index of each wanted row, in any order.
        outputs: names of output [R, H].
        name: name of the node.
    """
    inputs = (rows, row_indices,)
    return operator_node("GatherRows", inputs, outputs, name, {})


def narrow_step(
    query_start: str,
    past_len: str,
    row_indices: str,
    positions: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
) -> onnx.NodeProto:
    """Build a NarrowStep node.

    What the inputs of a step become where some rows go on and the others do not. The wanted rows are the
    last ones of their sequences, so these are sequences that begin later: past_len_out = past_len + the
    rows that a sequence drops.

    Args:
        query_start: [B+1] tensor(int32). Sequence b owns the packed rows query_start[b] ..
            query_start[b+1].
        past_len: [B] or [B, Hkv] tensor(int32). Tokens already in this cache before the step, per sequence
            or per kv head.
        row_indices: [R] tensor(int64). Index of each wanted row, in ascending order. Where every row of the
            sequences is wanted, indices of any rows may follow; they belong to no sequence.
        positions: [T] tensor(int64). Logical position of each row; given exactly where positions_out is
            asked for.
        outputs: names of query_start_out [B+1], past_len_out [B] or [B, Hkv], positions_out [R].
        name: name of the node.
    """
    inputs = (query_start, past_len, row_indices, positions,)
    return operator_node("NarrowStep", inputs, outputs, name, {})


def rms_norm_add(
    x: str,
    norm_weight: str,
    residual: str = "",
    scale: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    epsilon: float = 1e-06,
) -> onnx.NodeProto:
    """Build a RmsNormAdd node.

    A norm, and what follows it: y = (residual + RMSNorm(x)) * scale, in float32 and rounded once.

    Args:
        x: [T, I] T1. The branch.
        norm_weight: [I] T1. Weight of the RMSNorm.
        residual: [T, I] T1. Added to the norm.
        scale: [1] T1. Multiplied with the sum.
        outputs: names of y [T, I].
        name: name of the node.
        epsilon: Added to the mean square of an RMSNorm. Allowed: 0 or more.
    """
    inputs = (x, norm_weight, residual, scale,)
    return operator_node("RmsNormAdd", inputs, outputs, name, {"epsilon": epsilon})
