"""Draws inputs of GateMul and DeltaGates, and computes them as standard operators of their type do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from fused_cases import plain_norm, rounded

from ortolan.custom_ops import fused_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCase:
    """Options of one GateMul; `x_columns` and `gate_columns` are those of the rows that hold x and the gates."""

    size: int = 48
    activation: str = "silu"
    gate_size: int = 0
    norm: int = 0
    residual: bool = False
    x_offset: int = 0
    gate_offset: int = 0
    beyond: int = 0  # columns behind those that are taken

    @property
    def attributes(self):
        """Return the node's attributes."""
        names = ("size", "activation", "gate_size", "x_offset", "gate_offset")
        return {name: getattr(self, name) for name in names} | {"epsilon": 1e-5}


def gate_feeds(case, tokens, element, seed=0):
    """Draw the inputs of a GateMul."""
    rng = np.random.default_rng(seed)
    shapes = {
        "x": (tokens, case.x_offset + case.size + case.beyond),
        "gate": (tokens, case.gate_offset + (case.gate_size or case.size) + case.beyond),
    }
    shapes |= {"norm_weight": (case.norm,)} if case.norm else {}
    shapes |= {"residual": (tokens, case.size)} if case.residual else {}
    return {name: (2 * rng.standard_normal(shape)).astype(element) for name, shape in shapes.items()}


def plain_gate_mul(case, feeds):
    """Compute a GateMul, rounding after each operator, [T, O] float32."""
    element = feeds["x"].dtype
    x = feeds["x"][:, case.x_offset : case.x_offset + case.size]
    gates = feeds["gate"][:, case.gate_offset : case.gate_offset + (case.gate_size or case.size)]
    y = x.astype(np.float32)
    if case.norm:
        y = plain_norm(x.reshape(len(x), case.size // case.norm, case.norm), feeds["norm_weight"], 1e-5).reshape(
            y.shape
        )
    opened = rounded(fused_reference.ROW_GATES[case.activation](gates.astype(np.float64)).astype(np.float32), element)
    y = rounded(y * np.repeat(opened, case.size // gates.shape[1], axis=1), element)
    return y + feeds["residual"].astype(np.float32) if case.residual else y


def delta_feeds(tokens, heads, element, offsets=(0, 0), seed=0):
    """Draw the inputs of a DeltaGates."""
    rng = np.random.default_rng(seed)
    shapes = {
        "decay_rows": (tokens, offsets[0] + heads + 3),
        "beta_rows": (tokens, offsets[1] + heads),
        "a_log": (heads,),
        "dt_bias": (heads,),
    }
    return {name: (3 * rng.standard_normal(shape)).astype(element) for name, shape in shapes.items()}
