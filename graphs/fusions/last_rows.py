"""The rows that the head reads: Slice, Sub and Gather pick the last of each sequence; they become one LastRows.

The three, of which ONNX Runtime's launches overlap with no other, would keep the head's weights waiting for the last
layer's end.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from ortolan.contract import QUERY_START
from ortolan.custom_ops import emitters
from ortolan.graphs.fusions.rewriter import GraphRewriter, Node, Tensor, produced_by


def fuse_last_rows(rewriter: GraphRewriter) -> None:
    """Rewrite each Gather of rows query_start[1:] - 1."""
    for gather in rewriter.nodes("Gather"):
        query_start = _query_start(gather)
        shape = rewriter.shapes.get(gather.inputs[0].name, [])
        if query_start is None or len(shape) != 2 or gather.attrs.get("axis", 0) != 0:
            continue
        inputs = {"x": gather.inputs[0], "query_start": query_start}
        path = str(gather.name).rsplit("/", 1)[0]
        rewriter.operator(f"{path}/LastRows", emitters.last_rows, inputs, list(gather.outputs))


def _query_start(gather: Node) -> Tensor | None:
    """Follow a Gather's indices up to the graph's query_start."""
    sub = produced_by(gather.inputs[1], "Sub")
    ends = None if sub is None else produced_by(sub.inputs[0], "Slice")
    if sub is None or ends is None or not _is(sub.inputs[1], 1) or not _is(ends.inputs[1], 1):
        return None
    whole = len(ends.inputs) < 4 or _is(ends.inputs[3], 0)
    source = ends.inputs[0]
    return source if whole and source.name == QUERY_START and _reaches_end(ends.inputs[2]) else None


def _is(tensor: Tensor, value: int) -> bool:
    return isinstance(tensor, gs.Constant) and tensor.values.reshape(-1).tolist() == [value]


def _reaches_end(tensor: Tensor) -> bool:
    return isinstance(tensor, gs.Constant) and tensor.values.size == 1 and int(tensor.values.reshape(())) >= 2**31 - 1
