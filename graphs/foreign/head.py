"""Cuts the rows before a graph's head down to those whose logits are wanted."""

from __future__ import annotations

from ortolan import contract
from ortolan.graphs.builder import FLOAT, GraphBuilder, Node, Tensor, producer
from ortolan.graphs.foreign.analysis import Analysis
from ortolan.graphs.foreign.values import Rows

PRODUCTS = frozenset(("MatMul", "FusedMatMul", "MatMulNBits", "Gemm"))


def cut_to_rows(graph: GraphBuilder, analysis: Analysis, logits: Tensor, logit_rows: Tensor) -> None:
    """Pick rows in front of the product that makes the vocabulary; declares the logits, [R, V] float32."""
    size, product = rows_of(analysis, logits).row_size, find_product(analysis, logits)
    if rows_of(analysis, logits).is_last:
        for node in analysis.last_token_nodes:
            _replace_pick(graph, analysis, node, logit_rows)
    elif product is None:
        logits = _pick(graph, analysis, logits, logit_rows, "head")
    else:
        product.inputs[0] = _pick(graph, analysis, product.inputs[0], logit_rows, "head")
    flat = graph.reshape("head/Reshape", logits, (-1, size))
    graph.output(graph.node("head/Cast", "Cast", [flat], {"to": FLOAT}), contract.LOGITS, FLOAT, ["R", size])


def _replace_pick(graph: GraphBuilder, analysis: Analysis, node: Node, logit_rows: Tensor) -> None:
    """Let a node that picks the last token of a batch entry pick the rows that are wanted."""
    picked = _pick(graph, analysis, node.inputs[0], logit_rows, node.name)
    dims = [-1 if dim is None else dim for dim in rows_of(analysis, node.outputs[0]).dims]
    graph.replace(node.outputs[0], graph.reshape(f"{node.name}/Reshape", picked, dims))


def find_product(analysis: Analysis, logits: Tensor) -> Node | None:
    """Walk back from the logits, past operators with one input that holds tokens; None where there is no such way."""
    tensor = logits
    while True:
        node = producer(tensor)
        inside = [] if node is None else [t for t in node.inputs if isinstance(analysis.values.get(t.name), Rows)]
        if node is None or len(inside) != 1:
            return None
        if node.op in PRODUCTS:
            return node if rows_of(analysis, inside[0]).pieces == 1 else None
        if len(inside[0].outputs) != 1:
            return None
        tensor = inside[0]


def _pick(graph: GraphBuilder, analysis: Analysis, hidden: Tensor, logit_rows: Tensor, path: str) -> Tensor:
    """Gather rows along the tokens."""
    axis = rows_of(analysis, hidden).dims.index(None)
    return graph.node(f"{path}/Gather", "Gather", [hidden, logit_rows], {"axis": axis})


def rows_of(analysis: Analysis, tensor: Tensor) -> Rows:
    """Return the tokens that a value holds."""
    rows = analysis.values[tensor.name]
    assert isinstance(rows, Rows), "the head was followed along tokens"
    return rows
