"""The operators of mixtures of experts in NumPy and float64, the oracle of their kernels' tests."""

from __future__ import annotations

import numpy as np

from ortolan.custom_ops.fused_reference import GATES
from ortolan.custom_ops.reference import Array, Floats


def moe_gate(
    router_logits: Array,
    selection_bias: Array | None = None,
    expert_scale: Array | None = None,
    *,
    top_k: int,
    scoring: str = "softmax",
    normalise: int = 0,
    scale: float = 1.0,
) -> tuple[Array, Floats]:
    """Choose experts [T, K] int32 and their weights [T, K], best first, by logits [T, E]."""
    logits = router_logits.astype(np.float64)
    if scoring == "softmax":
        scores = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        scores /= scores.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits))
    order = logits if selection_bias is None else scores + selection_bias
    experts = np.argsort(-order, axis=1, kind="stable")[:, :top_k]  # stable: of equals, the lower expert
    weights = np.take_along_axis(scores, experts, axis=1)
    if normalise:
        sums = weights.sum(axis=1, keepdims=True)
        weights = np.divide(weights, sums, out=np.zeros_like(weights), where=sums != 0)
    weights = weights * scale
    return experts.astype(np.int32), weights if expert_scale is None else weights * expert_scale[experts].astype(
        np.float64
    )


def gate(activation: str, gates: Floats, factors: Floats, *, limit: float = 7.0, alpha: float = 1.702) -> Floats:
    """Return activation(gates) * factors, or gpt-oss's clamped form of it."""
    if activation != "clamped_silu_mul":
        return GATES[activation](gates) * factors
    clamped = np.minimum(gates, limit)
    return np.asarray(clamped / (1 + np.exp(-alpha * clamped)) * (np.clip(factors, -limit, limit) + 1))


def moe_experts(
    x: Array,
    experts: Array,
    weights: Array,
    gate_up: Array,
    down: Array,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    residual: Array | None = None,
    *,
    activation: str = "silu_mul",
    limit: float = 7.0,
    alpha: float = 1.702,
) -> Floats:
    """Return residual + sum over k of weights[t, k] * expert(x[t]), [T, H], token by token; nothing is rounded.

    An expert that does not exist adds nothing.
    """
    wide = x.astype(np.float64)
    y = np.zeros(x.shape) if residual is None else residual.astype(np.float64)
    for expert in set(experts.ravel().tolist()) & set(range(len(gate_up))):
        tokens, choices = np.nonzero(experts == expert)
        inner = wide[tokens] @ gate_up[expert].astype(np.float64).T
        if gate_up_bias is not None:
            inner = inner + gate_up_bias[expert].astype(np.float64)
        gates, factors = np.split(inner, 2, axis=1)
        out = gate(activation, gates, factors, limit=limit, alpha=alpha) @ down[expert].astype(np.float64).T
        if down_bias is not None:
            out = out + down_bias[expert].astype(np.float64)
        np.add.at(y, tokens, weights[tokens, choices, None].astype(np.float64) * out)
    return y
