"""Cuts the rows before a graph's head down to the last one of each sequence."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ortolan import contract
from ortolan.graphs.foreign.analysis import Analysis
from ortolan.graphs.foreign.values import Rows
from ortolan.graphs.fusions.rewriter import GraphRewriter, Node, Tensor, producer

_PRODUCTS = frozenset(("MatMul", "MatMulNBits", "Gemm"))
_END = 2**31 - 1


def cut_to_last_rows(rewriter: GraphRewriter, analysis: Analysis, logits: Tensor, query_start: Tensor) -> Tensor:
    """Pick rows in front of the product that makes the vocabulary; returns the logits, [B, V] float32."""
    size, product = _rows(analysis, logits).row_size, _find_product(analysis, logits)
    if _rows(analysis, logits).is_last:
        for node in analysis.last_token_nodes:
            _replace_pick(rewriter, analysis, node, query_start)
    elif product is None:
        logits = _pick(rewriter, analysis, logits, query_start, "head")
    else:
        product.inputs[0] = _pick(rewriter, analysis, product.inputs[0], query_start, "head")
    flat, shape = rewriter.value("head/rows"), rewriter.constant("shapes/logits", [-1, size])
    rewriter.node("head/Reshape", "Reshape", [logits, shape], [flat])
    output = gs.Variable(contract.LOGITS, dtype=onnx.TensorProto.FLOAT, shape=["B", size])
    rewriter.node("head/Cast", "Cast", [flat], [output], to=onnx.TensorProto.FLOAT)
    return output


def _replace_pick(rewriter: GraphRewriter, analysis: Analysis, node: Node, query_start: Tensor) -> None:
    """Let a node that picks the last token of a batch entry pick that of each packed sequence."""
    picked = _pick(rewriter, analysis, node.inputs[0], query_start, node.name)
    dims = [-1 if dim is None else dim for dim in _rows(analysis, node.outputs[0]).dims]
    shape = rewriter.constant("shapes/" + "x".join(map(str, dims)), dims)
    rewriter.node(f"{node.name}/Reshape", "Reshape", [picked, shape], [node.outputs[0]])


def _find_product(analysis: Analysis, logits: Tensor) -> Node | None:
    """Walk back from the logits, past operators with one input that holds tokens; None where there is no such way."""
    tensor = logits
    while True:
        node = producer(tensor)
        inside = [] if node is None else [t for t in node.inputs if isinstance(analysis.values.get(t.name), Rows)]
        if node is None or len(inside) != 1:
            return None
        if node.op in _PRODUCTS:
            return node if _rows(analysis, inside[0]).pieces == 1 else None
        if len(inside[0].outputs) != 1:
            return None
        tensor = inside[0]


def _pick(rewriter: GraphRewriter, analysis: Analysis, hidden: Tensor, query_start: Tensor, path: str) -> Tensor:
    """Return Gather(hidden, query_start[1:] - 1) along the tokens."""
    axis = _rows(analysis, hidden).dims.index(None)
    ends, last, picked = (rewriter.value(f"{path}/{name}/output") for name in ("ends", "last_rows", "Gather"))
    bounds = [rewriter.constant(f"slice/{name}", [at]) for name, at in (("one", 1), ("end", _END))]
    rewriter.node(f"{path}/ends", "Slice", [query_start, *bounds], [ends])
    rewriter.node(f"{path}/last_rows", "Sub", [ends, rewriter.constant("head/one", [1], np.int32)], [last])
    rewriter.node(f"{path}/Gather", "Gather", [hidden, last], [picked], axis=axis)
    return picked


def _rows(analysis: Analysis, tensor: Tensor) -> Rows:
    rows = analysis.values[tensor.name]
    assert isinstance(rows, Rows), "the head was followed along tokens"
    return rows
