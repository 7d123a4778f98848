"""Builds nodes of the operators in kernels/expert_params.h; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`."""

from __future__ import annotations

import onnx

from ortolan.custom_ops.node import operator_node


def moe_gate(
    router_logits: str,
    selection_bias: str = "",
    expert_scale: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    top_k: int = 1,
    scoring: str = "softmax",
    normalise: int = 0,
    scale: float = 1.0,
) -> onnx.NodeProto:
    """Build a MoeGate node.

    Chooses the experts of each token, best first: the K largest logits; of equals, the lower expert. With a
    selection_bias, the K largest sums of score and bias. A weight is the chosen expert's score (softmax
    over all experts, or sigmoid), divided by the sum of the chosen scores if asked for (a sum of 0 gives
    weights of 0), times scale, times expert_scale. All in float32. Where a logit is NaN, the weights of
    softmax are NaN, and which experts are chosen is open; they are K different ones all the same.

    Args:
        router_logits: [T, E] T1. A logit per token and expert.
        selection_bias: [E] tensor(float). Added to the scores by which experts are chosen, not to the
            weights.
        expert_scale: [E] tensor(float). Factor of each expert's weight.
        outputs: names of experts [T, K], weights [T, K].
        name: name of the node.
        top_k: K: experts that a token takes. Allowed: 1 to E.
        scoring: How logits become scores. Allowed: "softmax" or "sigmoid".
        normalise: 1: the chosen scores are divided by their sum. Allowed: 0 or 1.
        scale: Factor of all weights. Allowed: any finite number.
    """
    inputs = (router_logits, selection_bias, expert_scale,)
    return operator_node("MoeGate", inputs, outputs, name, {"top_k": top_k, "scoring": scoring, "normalise": normalise, "scale": scale})


def moe_experts(
    x: str,
    experts: str,
    weights: str,
    gate_up: str,
    down: str,
    gate_up_bias: str = "",
    down_bias: str = "",
    residual: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    activation: str = "silu_mul",
    limit: float = 7.0,
    alpha: float = 1.702,
) -> onnx.NodeProto:
    """Build a MoeExperts node.

    The gated MLPs of each token's experts: y = residual + the sum over k, in order, of weights[t, k] *
    (down @ h + down_bias), with h = act(gate_up @ x + gate_up_bias) of expert experts[t, k]. Sums are
    float32; h and y are rounded to T1. The first I rows of an expert's gate_up are the gate, the last I the
    factor: act(gate) * factor. clamped_silu_mul: with gate = min(gate, limit) and factor between -limit and
    limit, gate * sigmoid(alpha * gate) * (factor + 1). Deterministic. A token's result does not depend on
    the other tokens, as long as one kernel family serves the step: on CUDA, steps of up to 8 (or E / 8)
    pairs of token and expert have one, larger ones of 16-bit elements another, which rounds each expert's
    down @ h + down_bias to T1. An expert outside 0 .. E - 1 is refused on the CPU; on CUDA it adds nothing.

    Args:
        x: [T, H] T1. Rows of H features.
        experts: [T, K] tensor(int32). Experts of each token.
        weights: [T, K] tensor(float). Their weights.
        gate_up: [E, 2 * I, H] T1. First weight of each expert.
        down: [E, H, I] T1. Second weight of each expert.
        gate_up_bias: [E, 2 * I] T1. Added to the first product.
        down_bias: [E, H] T1. Added to the second product.
        residual: [T, H] T1. Added to the sum.
        outputs: names of y [T, H].
        name: name of the node.
        activation: Gated activation. Allowed: "silu_mul", "gelu_mul" (erf), "gelu_tanh_mul" or
            "clamped_silu_mul".
        limit: Of clamped_silu_mul: bounds its inputs. Allowed: 0 or more.
        alpha: Of clamped_silu_mul: in its sigmoid. Allowed: any finite number.
    """
    inputs = (x, experts, weights, gate_up, down, gate_up_bias, down_bias, residual,)
    return operator_node("MoeExperts", inputs, outputs, name, {"activation": activation, "limit": limit, "alpha": alpha})
