"""What a kind of mixer or MLP is: a line of its registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ortolan.graphs.builder import Tensor

Shapes: TypeAlias = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """One kind of mixer or MLP.

    Attributes:
        weights: lists its weights by their names inside the layer, with shapes; takes its config and the hidden size.
        add: adds it to a graph, [T, hidden] -> [T, hidden]; takes the `Parts`, the layer's index, its input (a tensor
            or a `Normed`), and the residual to add, or None.
        joint: linear layers of one input, by the name of the whole, which a graph may read as one; of several
            wholes that a layer has the members of, the first counts.
    """

    weights: Callable[[Any, int], Shapes]
    add: Callable[[Any, int, Any, Tensor | None], Tensor]
    joint: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def linear_shapes(layers: Mapping[str, tuple[int, int, bool]]) -> Shapes:
    """List the weights of linear layers, given as (out, in, whether there is a bias) by name."""
    shapes: Shapes = {}
    for name, (rows, columns, bias) in layers.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes
