"""The gated MLP: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from ortolan.graphs.builder import Tensor
from ortolan.graphs.config import MlpConfig
from ortolan.graphs.kinds import LayerKind, Shapes, linear_shapes
from ortolan.graphs.parts import Normed, Parts


def weights(config: MlpConfig, hidden_size: int) -> Shapes:
    """List the weights."""
    inner = config.intermediate_size
    into, out = (inner, hidden_size, config.bias), (hidden_size, inner, config.bias)
    return linear_shapes({"mlp.gate": into, "mlp.up": into, "mlp.down": out})


def add(parts: Parts, index: int, x: Tensor | Normed, residual: Tensor | None) -> Tensor:
    """Add one layer's MLP, [T, hidden] -> [T, hidden]."""
    path = f"layers.{index}/mlp"
    inner = parts.gated(path, x, parts.config.layers[index].mlp.activation)
    return parts.linear(f"{path}/down", inner, residual)


MLP = LayerKind(weights=weights, add=add, joint={"mlp.gate_up": ("mlp.gate", "mlp.up")})
