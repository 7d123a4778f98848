"""Gates on rows in the fused graph: one operator in the place of a norm, an activation and a product."""

from __future__ import annotations

from dataclasses import dataclass

from ortolan.graphs.builder import Tensor, emitters
from ortolan.graphs.parts import Columns, Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """What a gate lets through.

    Attributes:
        x: rows that hold `size` columns.
        gates: columns of gates.
        size: columns of the result.
        activation: "silu", "sigmoid", "softplus", "gelu" or "gelu_tanh".
        gate_size: gates of a row, each for `size / gate_size` columns; 0: one for each.
        norm: name of the weight and epsilon of an RMSNorm of x.
        residual: [T, size], added to the result.
    """

    x: Columns
    gates: Columns
    size: int
    activation: str
    gate_size: int = 0
    norm: tuple[str, float] | None = None
    residual: Tensor | None = None


def gate_mul(parts: Parts, path: str, gated: Gated) -> Tensor:
    """Add residual + activation(gates) * norm(x), [T, size]."""
    weight, epsilon = gated.norm or (None, parts.config.norm_epsilon)
    (y,) = parts.graph.operator(
        f"{path}/GateMul",
        emitters.gate_mul,
        {
            "x": gated.x.rows,
            "gate": gated.gates.rows,
            "norm_weight": None if weight is None else parts.weight(weight),
            "residual": gated.residual,
        },
        activation=gated.activation,
        size=gated.size,
        x_offset=gated.x.offset,
        gate_offset=gated.gates.offset,
        gate_size=gated.gate_size,
        epsilon=epsilon,
    )
    return y
