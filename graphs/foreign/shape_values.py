"""Follows shapes that a graph computes: small integer tensors made of the dimensions of values that hold tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from ortolan.graphs.foreign.values import Rows, View


@dataclass(frozen=True, slots=True)
class Count:
    """A dimension that counts tokens: so many entries of each."""

    pieces: int


Contents: TypeAlias = npt.NDArray[Any]  # of int and Count, a scalar or a vector


def evaluate(view: View) -> Contents | None:
    """Return what a node's first output holds, as far as it is a shape; None where it is something else."""
    if view.node.op == "Shape":
        return _shape(view)
    rule = _RULES.get(view.node.op)
    given = [contents_of(view, index) for index in range(len(view.values))]
    if rule is None or not given or given[0] is None or view.node.domain:
        return None
    return rule(view, given)


def contents_of(view: View, index: int) -> Contents | None:
    """Return what an input holds: a constant's integers, or what was followed to it."""
    if not view.has(index):
        return None
    tensor = view.node.inputs[index]
    if isinstance(tensor, gs.Constant):
        values = np.asarray(tensor.values)
        return values.astype(object) if np.issubdtype(values.dtype, np.integer) and values.ndim < 2 else None
    return view.contents.get(tensor.name)


def _shape(view: View) -> Contents | None:
    rows = view.values[0]
    if not isinstance(rows, Rows) or rows.is_last:
        return None
    dims = [Count(rows.pieces) if dim is None else dim for dim in rows.dims]
    begin, end = view.attribute("start", 0), view.attribute("end", len(dims))
    return np.array(dims[begin:end], object)


def _same(view: View, given: list[Contents | None]) -> Contents | None:
    return given[0]


def _gather(view: View, given: list[Contents | None]) -> Contents | None:
    data, index = given[0], given[1]
    if data is None or index is None or data.ndim != 1:
        return None
    picks = index.astype(np.int64)
    if np.any((picks < -len(data)) | (picks >= len(data))):
        return None
    return np.asarray(data[picks], object)


def _flat(view: View, given: list[Contents | None]) -> Contents | None:
    """Make a vector of what becomes one: of a scalar, or a reshape to [-1]."""
    return None if given[0] is None else given[0].reshape(-1)


def _squeeze(view: View, given: list[Contents | None]) -> Contents | None:
    return given[0].reshape(()) if given[0] is not None and given[0].size == 1 else None


def _concat(view: View, given: list[Contents | None]) -> Contents | None:
    parts = [part for part in given if part is not None and part.ndim == 1]
    return np.concatenate(parts) if len(parts) == len(given) else None


def _slice(view: View, given: list[Contents | None]) -> Contents | None:
    numbers = [None if part is None else int(part.reshape(-1)[0]) for part in given[1:]]
    if given[0] is None or len(numbers) < 2 or None in (*numbers[:2], *numbers[2:]):
        return None
    step = numbers[3] if len(numbers) > 3 else 1
    return given[0][numbers[0] : numbers[1] : step]


def _product(view: View, given: list[Contents | None]) -> Contents | None:
    left, right = given[0], given[1]
    if left is None or right is None or left.size != 1 or right.size != 1:
        return None
    first, second = left.reshape(-1)[0], right.reshape(-1)[0]
    if isinstance(first, Count):
        first, second = second, first
    if isinstance(first, Count):
        return None  # tokens times tokens
    result = Count(second.pieces * first) if isinstance(second, Count) else first * second
    return np.array([result], object).reshape(np.broadcast_shapes(left.shape, right.shape))


_RULES: Mapping[str, Callable[[View, list[Contents | None]], Contents | None]] = {
    "Cast": _same,
    "Identity": _same,
    "Gather": _gather,
    "Unsqueeze": _flat,
    "Reshape": _flat,
    "Squeeze": _squeeze,
    "Concat": _concat,
    "Slice": _slice,
    "Mul": _product,
}
