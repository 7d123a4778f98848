"""Builds nodes of the operators in kernels/gate_params.h; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`."""

from __future__ import annotations

import onnx

from ortolan.custom_ops.node import operator_node


def gate_mul(
    x: str,
    gate: str,
    norm_weight: str = "",
    residual: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    activation: str = "silu",
    size: int = 0,
    x_offset: int = 0,
    gate_offset: int = 0,
    gate_size: int = 0,
    epsilon: float = 1e-06,
) -> onnx.NodeProto:
    """Build a GateMul node.

    What a gate lets through: y = residual + act(gate) * x, in float32 and rounded once. x are O columns of
    a wider row, the gates gate_size columns of another, each for O / gate_size columns of x. With a norm
    weight, each N columns of x are normalised first.

    Args:
        x: [T, X] T1. Rows that hold x.
        gate: [T, G] T1. Rows that hold the gates.
        norm_weight: [N] T1. Weight of an RMSNorm of each N columns; absent: x is used as it is.
        residual: [T, O] T1. Added to the result.
        outputs: names of y [T, O].
        name: name of the node.
        activation: What gates go through. Allowed: "silu", "sigmoid", "softplus", "gelu" or "gelu_tanh".
        size: O: columns of y. Allowed: 1 or more.
        x_offset: First column of x. Allowed: 0 or more.
        gate_offset: Column of the first gate. Allowed: 0 or more.
        gate_size: Gates of a row; 0: O of them. Allowed: 0, or a divisor of O.
        epsilon: Added to the mean square of an RMSNorm. Allowed: 0 or more.
    """
    inputs = (x, gate, norm_weight, residual,)
    return operator_node("GateMul", inputs, outputs, name, {"activation": activation, "size": size, "x_offset": x_offset, "gate_offset": gate_offset, "gate_size": gate_size, "epsilon": epsilon})


def delta_gates(
    decay_rows: str,
    beta_rows: str,
    a_log: str,
    dt_bias: str,
    *,
    outputs: tuple[str, ...],
    name: str,
    decay_offset: int = 0,
    beta_offset: int = 0,
    beta_scale: float = 1.0,
) -> onnx.NodeProto:
    """Build a DeltaGates node.

    The gates of the gated delta rule, in float32: decay = -exp(a_log) * softplus(d + dt_bias) and beta =
    beta_scale * sigmoid(b), of Hv columns d and b of wider rows.

    Args:
        decay_rows: [T, X] T1. Rows that hold d.
        beta_rows: [T, Y] T1. Rows that hold b.
        a_log: [Hv] T1. Logarithm of each head's rate.
        dt_bias: [Hv] T1. Added to d.
        outputs: names of decay [T, Hv], beta [T, Hv].
        name: name of the node.
        decay_offset: Column of the first d. Allowed: 0 or more.
        beta_offset: Column of the first b. Allowed: 0 or more.
        beta_scale: Multiplies beta. Allowed: any finite number.
    """
    inputs = (decay_rows, beta_rows, a_log, dt_bias,)
    return operator_node("DeltaGates", inputs, outputs, name, {"decay_offset": decay_offset, "beta_offset": beta_offset, "beta_scale": beta_scale})
