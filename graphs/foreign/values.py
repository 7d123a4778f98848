"""What a value of a foreign graph is, as far as packing tokens is concerned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from ortolan.errors import UnsupportedModelError
from ortolan.graphs.builder import Node, Tensor

Dimensions: TypeAlias = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """A value that holds the elements of one token together, tokens in order, in a batch of one.

    Attributes:
        dims: sizes; the one that is None counts tokens, or a fixed number of pieces of each. Those before it are 1.
        row_size: elements of a token.
        is_last: whether only the last token of each sequence is left, so that the axis counts sequences.
    """

    dims: Dimensions
    row_size: int
    is_last: bool = False

    @property
    def inner(self) -> int:
        """How many axes, from the last one on, lie inside a token."""
        return len(self.dims) - 1 - self.dims.index(None)

    @property
    def inner_dims(self) -> tuple[int, ...]:
        """Sizes of the axes inside a token."""
        return tuple(dim or 0 for dim in self.dims[len(self.dims) - self.inner :])

    @property
    def pieces(self) -> int:
        """How many entries of the dynamic axis a token has."""
        return self.row_size // math.prod(self.inner_dims)

    def with_inner(self, dims: tuple[int, ...]) -> Rows:
        """Return rows with as many pieces of other sizes."""
        outer = self.dims[: len(self.dims) - self.inner]
        return Rows((*outer, *dims), self.pieces * math.prod(dims), self.is_last)


class Kind(Enum):
    """A value that does not contain tokens."""

    CONSTANT = "constant"
    LENGTHS = "computed from the attention mask, from shapes or from another input"
    CACHE = "a key/value cache"


Value: TypeAlias = Rows | Kind

TOKENS = Rows((1, None), 1)  # of input_ids and position_ids, once a batch of one holds all packed tokens


def refusal(node: Node, reason: str) -> UnsupportedModelError:
    """Make the error for a node that stands in the way."""
    return UnsupportedModelError(f"cannot convert node '{node.name}', a {node.op}: {reason}")


@dataclass(frozen=True, slots=True)
class View:
    """A node with what is known of its inputs.

    Attributes:
        node: the node.
        values: of the inputs; None for one that is left out.
        shapes: of constants, by name, as far as onnx infers them.
        contents: of shapes that the graph computes, by name.
    """

    node: Node
    values: tuple[Value | None, ...]
    shapes: Mapping[str, list[int | None]]
    contents: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def refuse(self, reason: str) -> UnsupportedModelError:
        """Make the error for this node."""
        return refusal(self.node, reason)

    def has(self, index: int) -> bool:
        """Tell whether an input is given."""
        return index < len(self.values) and self.values[index] is not None

    def tensor(self, index: int) -> Tensor | None:
        """Return an input; None where it is left out."""
        return self.node.inputs[index] if self.has(index) else None

    def attribute(self, name: str, default: Any) -> Any:
        """Return an attribute; texts come as str."""
        value = self.node.attrs.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def rows(self, index: int) -> Rows:
        """Return an input that must hold tokens."""
        value = self.values[index] if self.has(index) else None
        if not isinstance(value, Rows):
            what = "left out" if value is None else value.value
            raise self.refuse(f"input {index} must hold tokens, but is {what}")
        return value

    def require_constants(self, *indices: int) -> None:
        """Check that inputs, where given, are constant."""
        for index in indices:
            if self.has(index) and self.values[index] is not Kind.CONSTANT:
                raise self.refuse(f"input {index}, '{self.node.inputs[index].name}', must be constant")

    def constant(self, index: int) -> npt.NDArray[Any] | None:
        """Return the values of a constant input; None where it is left out."""
        if not self.has(index):
            return None
        tensor = self.node.inputs[index]
        if not isinstance(tensor, gs.Constant):
            raise self.refuse(f"input {index}, '{tensor.name}', must be a constant in the graph, not computed")
        return np.asarray(tensor.values)

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of a constant input, all of whose dimensions must be known."""
        if not self.has(index):
            raise self.refuse(f"input {index} is left out")
        tensor = self.node.inputs[index]
        shape = self.shapes.get(tensor.name)
        if shape is None and isinstance(tensor, gs.Constant):
            shape = list(tensor.shape)
        if shape is None or None in shape:
            raise self.refuse(f"the shape of input {index}, '{tensor.name}', is not known")
        return tuple(dim for dim in shape if dim is not None)

    def inner_axis(self, rows: Rows, axis: int) -> int:
        """Return an axis counted from 0, which must lie inside a token."""
        rank = len(rows.dims)
        counted = axis + rank if axis < 0 else axis
        if not rank - rows.inner <= counted < rank:
            raise self.refuse(f"axis {axis} runs over tokens, and packed sequences must not mix")
        return counted
