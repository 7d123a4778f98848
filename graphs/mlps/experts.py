"""A mixture of experts: a router chooses gated MLPs for each token, and their results are summed by its weights.

Where there is a shared expert, a gated MLP that every token takes, its result is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ortolan.graphs.builder import Tensor, emitters
from ortolan.graphs.config import ExpertsConfig
from ortolan.graphs.formats.dense import Dense
from ortolan.graphs.gates import Gated, gate_mul
from ortolan.graphs.kinds import LayerKind, Shapes, linear_shapes
from ortolan.graphs.parts import Columns, Normed, Parts


def weights(config: ExpertsConfig, hidden_size: int) -> Shapes:
    """List the weights; those of all experts lie in one tensor, the rows of a gate before those of its factor."""
    count, inner = config.num_experts, config.intermediate_size
    shapes = linear_shapes({"mlp.router": (count, hidden_size, config.router_bias)})
    if config.selection_bias:
        shapes["mlp.router.selection_bias"] = (count,)
    shapes["mlp.experts.gate_up"] = (count, 2 * inner, hidden_size)
    shapes["mlp.experts.down"] = (count, hidden_size, inner)
    if config.shared_size:
        into, out = (config.shared_size, hidden_size, False), (hidden_size, config.shared_size, False)
        shapes |= linear_shapes({"mlp.shared.gate": into, "mlp.shared.up": into, "mlp.shared.down": out})
    if config.shared_gate:
        shapes |= linear_shapes({"mlp.shared_gate": (1, hidden_size, False)})
    if config.bias:
        shapes["mlp.experts.gate_up_bias"] = (count, 2 * inner)
        shapes["mlp.experts.down_bias"] = (count, hidden_size)
    return shapes


def add(parts: Parts, index: int, x: Tensor | Normed, residual: Tensor | None) -> Tensor:
    """Add one layer's mixture, [T, hidden] -> [T, hidden]."""
    config, path = parts.config.layers[index].mlp, f"layers.{index}/mlp"
    rows = parts.value(x)
    if config.shared_size:
        inner = parts.gated(f"{path}/shared", rows, config.activation)
        residual = _gated(parts, path, config, rows, inner, residual)
        parts.graph.describe(residual, parts.options.onnx_type, (parts.row_axis, parts.config.hidden_size))
    logits = parts.linear(f"{path}/router", rows)
    return mix(parts, index, config, {"rows": rows, "logits": logits, "residual": residual})


def _gated(
    parts: Parts, path: str, config: ExpertsConfig, rows: Tensor, inner: Tensor, residual: Tensor | None
) -> Tensor:
    """Add the second product of the shared expert, behind its gate where it has one, and the residual."""
    if not config.shared_gate:
        return parts.linear(f"{path}/shared/down", inner, residual)
    shared = parts.linear(f"{path}/shared/down", inner)
    if parts.options.fused:
        gate = Columns(parts.linear(f"{path}/shared_gate", rows))
        size = parts.config.hidden_size
        opened = Gated(x=Columns(shared), gates=gate, size=size, activation="sigmoid", gate_size=1, residual=residual)
        return gate_mul(parts, f"{path}/shared_gate", opened)
    share = parts.graph.node(f"{path}/shared_gate/Sigmoid", "Sigmoid", [parts.linear(f"{path}/shared_gate", rows)])
    gated = parts.graph.node(f"{path}/shared_gate/Mul", "Mul", [shared, share])
    return parts.add_residual(f"{path}/shared", gated, residual)


def mix(parts: Parts, index: int, config: ExpertsConfig, inputs: Mapping[str, Tensor | None]) -> Tensor:
    """Add the experts that a router chooses.

    Args:
        parts: of the decoder.
        index: of the layer.
        config: of the mixture.
        inputs: "rows" [T, hidden], "logits" [T, E], and where there are such "residual" [T, hidden] and "expert_scale"
            [E] float32.

    Returns:
        [T, hidden].
    """
    path, residual = f"layers.{index}/mlp", inputs.get("residual")
    experts, shares = parts.graph.operator(
        f"{path}/MoeGate",
        emitters.moe_gate,
        {
            "router_logits": _capped(parts, path, config.logit_softcap, inputs["logits"]),
            "selection_bias": _selection_bias(parts, path) if config.selection_bias else None,
            "expert_scale": inputs.get("expert_scale"),
        },
        num_outputs=2,
        top_k=config.experts_per_token,
        scoring=config.scoring,
        normalise=int(config.normalise),
        scale=config.scale,
    )
    biases = ("gate_up_bias", "down_bias") if config.bias else ()
    is_clamped = config.activation == "clamped_silu"
    clamp: dict[str, Any] = {"limit": config.limit, "alpha": config.alpha} if is_clamped else {}
    y = parts.formats.experts.get(f"layers.{index}.mlp.experts", Dense()).experts(
        parts,
        path,
        {
            "x": inputs["rows"],
            "experts": experts,
            "weights": shares,
            **{name: parts.weight(f"layers.{index}.mlp.experts.{name}") for name in biases},
            "residual": residual,
        },
        {"activation": f"{config.activation}_mul", **clamp},
    )
    if residual is not None:
        parts.graph.describe(y, parts.options.onnx_type, (parts.row_axis, parts.config.hidden_size))
    return y


def _capped(parts: Parts, path: str, softcap: float, logits: Tensor | None) -> Tensor | None:
    """Cap the router's logits, in float32."""
    if logits is None or not softcap:
        return logits
    cap = parts.graph.constant(f"{path}/router/softcap", softcap, np.float32)
    logits = parts.in_float32(f"{path}/router/softcap/Cast", logits)
    logits = parts.graph.node(f"{path}/router/softcap/Div", "Div", [logits, cap])
    logits = parts.graph.node(f"{path}/router/softcap/Tanh", "Tanh", [logits])
    return parts.graph.node(f"{path}/router/softcap/Mul", "Mul", [logits, cap])


def _selection_bias(parts: Parts, path: str) -> Tensor:
    weight = parts.weight(f"{path}.router.selection_bias".replace("/", "."))
    return parts.in_float32(f"{path}/selection_bias/Cast", weight)


MLP = LayerKind(weights=weights, add=add, joint={"mlp.shared.gate_up": ("mlp.shared.gate", "mlp.shared.up")})
