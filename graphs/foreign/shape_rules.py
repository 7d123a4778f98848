"""The rules of operators that cut, join and reshape what tokens hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ortolan.graphs.foreign.shape_values import Count, contents_of
from ortolan.graphs.foreign.values import Rows, View

END = 2**31 - 1  # of slices, up to the end


def _reshape(view: View) -> Rows:
    """Read the sizes of the result; memory order stays, so tokens stay together where none is torn apart."""
    rows, wanted = view.rows(0), contents_of(view, 1)
    if wanted is None or view.attribute("allowzero", 0):
        raise view.refuse("its shape is neither a constant nor made of dimensions, with 0 for one that stays")
    if rows.is_last and any(isinstance(dim, Count) for dim in wanted.reshape(-1)):
        raise view.refuse("its shape counts all tokens, and only the last one is left")
    text = [str(dim) for dim in wanted.reshape(-1)]
    dims = [_dimension(view, rows, index, dim) for index, dim in enumerate(wanted.reshape(-1))]
    counts = [dim for dim in dims if isinstance(dim, Count)]
    known = math.prod(dim for dim in dims if not isinstance(dim, Count) and dim != -1)
    if -1 in dims:
        rest = rows.row_size // max(1, known * counts[0].pieces) if counts else Count(rows.row_size // max(1, known))
        dims[dims.index(-1)] = rest
        counts = counts or [dim for dim in dims if isinstance(dim, Count)]
    if len(counts) != 1:
        raise view.refuse(f"its shape [{', '.join(text)}] fixes the number of tokens")
    at = dims.index(counts[0])
    before, inner = math.prod(_numbers(dims[:at])), math.prod(_numbers(dims[at + 1 :]))
    if before != 1 or counts[0].pieces * inner != rows.row_size:
        raise view.refuse(f"its shape [{', '.join(text)}] tears apart or joins tokens of {rows.row_size} elements")
    return replace(rows, dims=tuple(None if isinstance(dim, Count) else dim for dim in dims))


def _dimension(view: View, rows: Rows, index: int, wanted: int | Count) -> int | Count:
    """Return one dimension of a shape; 0 takes the input's."""
    if wanted != 0:
        return wanted
    if index >= len(rows.dims):
        raise view.refuse("its shape has more dimensions to keep than its input")
    kept = rows.dims[index]
    return Count(rows.pieces) if kept is None else kept


def _numbers(dims: list[int | Count]) -> list[int]:
    return [dim for dim in dims if not isinstance(dim, Count)]


def _axes(view: View, rows: Rows, default: list[int] | None = None) -> list[int]:
    """Read `axes`, an attribute in old opsets and an input in new ones."""
    axes = view.attribute("axes", None)
    if axes is None:
        given = view.constant(1)
        axes = default if given is None else given.reshape(-1).tolist()
    if axes is None:
        raise view.refuse("it runs over all axes, and packed sequences must not mix")
    return [int(axis) for axis in axes]


def _reduce(view: View) -> Rows:
    rows = view.rows(0)
    inner = list(rows.inner_dims)
    first = len(rows.dims) - rows.inner
    reduced = {view.inner_axis(rows, axis) - first for axis in _axes(view, rows)}
    keep = bool(view.attribute("keepdims", 1))
    sizes = [1 if index in reduced else dim for index, dim in enumerate(inner) if keep or index not in reduced]
    return rows.with_inner(tuple(sizes))


def _squeeze(view: View) -> Rows:
    rows = view.rows(0)
    rank = len(rows.dims)
    removed = {axis % rank for axis in _axes(view, rows)}
    if any(rows.dims[axis] != 1 for axis in removed):
        raise view.refuse(f"it removes an axis of {list(rows.dims)} that is not 1")
    return replace(rows, dims=tuple(dim for axis, dim in enumerate(rows.dims) if axis not in removed))


def _unsqueeze(view: View) -> Rows:
    rows = view.rows(0)
    axes = _axes(view, rows)
    rank = len(rows.dims) + len(axes)
    added, old = {axis % rank for axis in axes}, iter(rows.dims)
    return replace(rows, dims=tuple(1 if axis in added else next(old) for axis in range(rank)))


def _transpose(view: View) -> Rows:
    rows = view.rows(0)
    rank = len(rows.dims)
    order = [int(axis) for axis in view.attribute("perm", list(reversed(range(rank))))]
    if order != list(range(rank)):
        raise view.refuse(f"it moves axes ({order}), and tokens must stay in rows")
    return rows


def _replace(rows: Rows, axis: int, size: int) -> Rows:
    inner = list(rows.inner_dims)
    inner[axis - len(rows.dims) + rows.inner] = size
    return rows.with_inner(tuple(inner))


def _split(view: View) -> list[Rows]:
    rows = view.rows(0)
    axis = view.inner_axis(rows, int(view.attribute("axis", 0)))
    sizes = view.attribute("split", None)
    if sizes is None and view.has(1):
        given = view.constant(1)
        sizes = [] if given is None else given.reshape(-1).tolist()
    if sizes is None:
        count, whole = len(view.node.outputs), rows.dims[axis] or 0
        part = -(-whole // count)
        sizes = [min(part, whole - part * index) for index in range(count)]
    return [_replace(rows, axis, int(size)) for size in sizes]


def _slice(view: View) -> Rows:
    rows = view.rows(0)
    starts, ends, axes, steps = (view.constant(index) for index in (1, 2, 3, 4))
    if starts is None or ends is None:
        raise view.refuse("it needs its starts and ends as inputs")
    cut = list(range(len(starts))) if axes is None else [int(axis) for axis in axes]
    if is_last_token(rows, cut, [int(start) for start in starts]) and (steps is None or int(steps[0]) == 1):
        if int(ends[0]) < END:
            raise view.refuse("it keeps some of the tokens; only the last one may be kept")
        return Rows((None, 1, rows.row_size), rows.row_size, is_last=True)
    for index, given in enumerate(cut):
        axis = view.inner_axis(rows, given)
        step = 1 if steps is None else int(steps[index])
        size = len(range(rows.dims[axis] or 0)[int(starts[index]) : int(ends[index]) : step])
        rows = _replace(rows, axis, size)
    return rows


def is_last_token(rows: Rows, axes: list[int], starts: list[int]) -> bool:
    """Tell whether position -1 of the tokens [1, T, features] is picked, and nothing else."""
    is_plain = rows == Rows((1, None, rows.row_size), rows.row_size)
    return is_plain and axes in ([1], [-2]) and starts == [-1]


def _concat(view: View) -> Rows:
    parts = [view.rows(index) for index in range(len(view.values))]
    axis = view.inner_axis(parts[0], int(view.attribute("axis", -1)))
    if any(part.inner != parts[0].inner or _replace(part, axis, 1) != _replace(parts[0], axis, 1) for part in parts):
        raise view.refuse("its inputs do not hold tokens in the same layout")
    return _replace(parts[0], axis, sum(part.dims[axis] or 0 for part in parts))


RULES: Mapping[str, Callable[[View], Rows | list[Rows]]] = {
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Split": _split,
    "Slice": _slice,
    "Concat": _concat,
    **dict.fromkeys(
        ("ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare", "ReduceProd"), _reduce
    ),
}
