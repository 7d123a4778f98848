"""The gated MLP of a decoder layer."""

from __future__ import annotations

from ortolan.graphs.builder import Tensor
from ortolan.graphs.parts import Parts


def add_mlp(parts: Parts, path: str, hidden: Tensor) -> Tensor:
    """Add down(activation(gate(x)) * up(x)), [T, hidden] -> [T, hidden]."""
    gate = _activate(parts, path, parts.linear(f"{path}/gate", hidden))
    up = parts.linear(f"{path}/up", hidden)
    return parts.linear(f"{path}/down", parts.graph.node(f"{path}/Mul", "Mul", [gate, up]))


def _activate(parts: Parts, path: str, gate: Tensor) -> Tensor:
    if parts.config.activation == "silu":
        sigmoid = parts.graph.node(f"{path}/silu/Sigmoid", "Sigmoid", [gate])
        return parts.graph.node(f"{path}/silu/Mul", "Mul", [gate, sigmoid])
    approximate = "tanh" if parts.config.activation == "gelu_tanh" else "none"
    return parts.graph.node(f"{path}/Gelu", "Gelu", [gate], {"approximate": approximate})
