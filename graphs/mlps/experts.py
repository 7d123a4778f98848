"""A mixture of experts: a router chooses gated MLPs for each token, and their results are summed by its weights."""

from __future__ import annotations

from ortolan.graphs.builder import Tensor, emitters
from ortolan.graphs.config import ExpertsConfig
from ortolan.graphs.kinds import LayerKind, Shapes, linear_shapes
from ortolan.graphs.parts import Normed, Parts


def weights(config: ExpertsConfig, hidden_size: int) -> Shapes:
    """List the weights; those of all experts lie in one tensor, the rows of a gate before those of its factor."""
    count, inner = config.num_experts, config.intermediate_size
    shapes = linear_shapes({"mlp.router": (count, hidden_size, config.router_bias)})
    shapes["mlp.experts.gate_up"] = (count, 2 * inner, hidden_size)
    shapes["mlp.experts.down"] = (count, hidden_size, inner)
    if config.bias:
        shapes["mlp.experts.gate_up_bias"] = (count, 2 * inner)
        shapes["mlp.experts.down_bias"] = (count, hidden_size)
    return shapes


def add(parts: Parts, index: int, x: Tensor | Normed, residual: Tensor | None) -> Tensor:
    """Add one layer's mixture, [T, hidden] -> [T, hidden]."""
    config, path = parts.config.layers[index].mlp, f"layers.{index}/mlp"
    rows = parts.value(x)
    experts, shares = parts.graph.operator(
        f"{path}/MoeGate",
        emitters.moe_gate,
        {"router_logits": parts.linear(f"{path}/router", rows)},
        num_outputs=2,
        top_k=config.experts_per_token,
        normalise=int(config.normalise),
    )
    names = ("gate_up", "down", *(("gate_up_bias", "down_bias") if config.bias else ()))
    clamp = {"limit": config.limit, "alpha": config.alpha} if config.activation == "clamped_silu" else {}
    (y,) = parts.graph.operator(
        f"{path}/MoeExperts",
        emitters.moe_experts,
        {
            "x": rows,
            "experts": experts,
            "weights": shares,
            **{name: parts.weight(f"layers.{index}.mlp.experts.{name}") for name in names},
            "residual": residual,
        },
        activation=f"{config.activation}_mul",
        **clamp,
    )
    if residual is not None:
        parts.graph.describe(y, parts.options.onnx_type, (parts.row_axis, parts.config.hidden_size))
    return y


MLP = LayerKind(weights=weights, add=add)
