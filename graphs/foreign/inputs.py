"""Puts packed inputs in the place of a foreign graph's batch of padded sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from ortolan import contract
from ortolan.graphs.builder import INT64, GraphBuilder, Tensor
from ortolan.graphs.foreign import gqa
from ortolan.graphs.foreign.analysis import Analysis
from ortolan.graphs.foreign.values import TOKENS, Kind, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceNames:
    """Names of the foreign graph's inputs and outputs."""

    token_ids: str = "input_ids"
    positions: str = "position_ids"
    logits: str = "logits"


def input_values(graph: GraphBuilder, names: SourceNames) -> dict[str, Value]:
    """Say what the graph's inputs are: tokens, caches (what attention takes as such), or else lengths."""
    values: dict[str, Value] = {}
    for tensor in graph.graph.inputs:
        readers = [node for node in tensor.outputs if node.op == gqa.OPERATOR]
        ports = {port for node in readers for port, given in enumerate(node.inputs) if given is tensor}
        if tensor.name in (names.token_ids, names.positions) and len(tensor.shape or ()) in (0, 2):
            values[tensor.name] = TOKENS
        else:
            values[tensor.name] = Kind.CACHE if ports & {gqa.PAST_KEY, gqa.PAST_VALUE} else Kind.LENGTHS
    return values


def replace_inputs(graph: GraphBuilder, analysis: Analysis, names: SourceNames, first_rows: int) -> Tensor | None:
    """Declare token_ids and positions, and feed the foreign inputs from them, as a batch of one.

    Args:
        graph: whose inputs are replaced; other inputs go.
        analysis: of the graph.
        names: of the foreign inputs.
        first_rows: above 0, RoPE's tables hold two variants, the second one from that row on.

    Returns:
        Rows of the RoPE tables, [1, T] int64; None where nothing rotates.
    """
    old = {tensor.name: tensor for tensor in graph.graph.inputs}
    graph.graph.inputs = []
    token_ids = graph.input(contract.TOKEN_IDS, INT64, ["T"])
    batch = graph.node("embedding/token_ids/Unsqueeze", "Unsqueeze", [token_ids, _first_axis(graph)])
    _feed(graph, batch, old[names.token_ids])
    given = old.get(names.positions)
    is_read = given is not None and bool(given.outputs)
    if not is_read and not analysis.rotary_nodes and not any(a.rotation for a in analysis.attentions):
        return None
    positions = _positions(graph, first_rows)
    if is_read:
        _feed(graph, positions, given)
    return positions


def _feed(graph: GraphBuilder, given: Tensor, tensor: Tensor) -> None:
    """Let what reads `tensor`, of whatever integer type, read `given`."""
    name = f"inputs/{tensor.name}/Cast"
    graph.replace(tensor, graph.node(name, "Cast", [given], {"to": onnx_type(tensor)}))


def _positions(graph: GraphBuilder, first_rows: int) -> Tensor:
    """Return the rows of the RoPE tables, [1, T] int64."""
    rows = graph.input(contract.POSITIONS, INT64, ["T"])
    if first_rows:
        variant = graph.input(contract.ROPE_VARIANT, INT64, ["T"])
        first = graph.constant("rope/first_rows", [first_rows], np.int64)
        rows = graph.node("rope/positions/Add", "Add", [rows, graph.node("rope/Mul", "Mul", [variant, first])])
    return graph.node("rope/Unsqueeze", "Unsqueeze", [rows, _first_axis(graph)])


def _first_axis(graph: GraphBuilder) -> Tensor:
    return graph.constant("axes/first", [0], np.int64)


def onnx_type(tensor: Tensor) -> int:
    """Return a tensor's element type as onnx numbers it."""
    if isinstance(tensor.dtype, int):
        return tensor.dtype
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype)))
