"""Puts packed inputs in the place of a foreign graph's batch of padded sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from ortolan import contract
from ortolan.graphs.foreign import gqa
from ortolan.graphs.foreign.analysis import Analysis
from ortolan.graphs.foreign.layers import Layer, StepInputs, declare_input
from ortolan.graphs.foreign.values import TOKENS, Kind, Value
from ortolan.graphs.fusions.rewriter import GraphRewriter, Tensor

INT32, INT64 = onnx.TensorProto.INT32, onnx.TensorProto.INT64


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceNames:
    """Names of the foreign graph's inputs and outputs."""

    token_ids: str = "input_ids"
    positions: str = "position_ids"
    logits: str = "logits"


def input_values(rewriter: GraphRewriter, names: SourceNames) -> dict[str, Value]:
    """Say what the graph's inputs are: tokens, caches (what attention takes as such), or else lengths."""
    values: dict[str, Value] = {}
    for tensor in rewriter.graph.inputs:
        readers = [node for node in tensor.outputs if node.op == gqa.OPERATOR]
        ports = {port for node in readers for port, given in enumerate(node.inputs) if given is tensor}
        if tensor.name in (names.token_ids, names.positions) and len(tensor.shape or ()) in (0, 2):
            values[tensor.name] = TOKENS
        else:
            values[tensor.name] = Kind.CACHE if ports & {gqa.PAST_KEY, gqa.PAST_VALUE} else Kind.LENGTHS
    return values


def replace_inputs(
    rewriter: GraphRewriter, analysis: Analysis, names: SourceNames, layers: list[Layer], first_rows: int
) -> StepInputs:
    """Declare the packed inputs and feed the foreign ones from them, as a batch of one.

    `first_rows` above 0 says that RoPE's tables hold two variants, the second one from that row on.
    """
    old = {tensor.name: tensor for tensor in rewriter.graph.inputs}
    rewriter.graph.inputs = []
    token_ids = declare_input(rewriter, contract.TOKEN_IDS, INT64, ["T"])
    _feed(rewriter, token_ids, old[names.token_ids], "embedding/token_ids")
    positions = None
    given = old.get(names.positions)
    given = given if given is not None and given.outputs else None
    if analysis.rotary_nodes or given is not None or any(layer.attention.rotation for layer in layers):
        positions = _positions(rewriter, first_rows)
        if given is not None:
            _feed_typed(rewriter, positions, given)
    return StepInputs(
        query_start=declare_input(rewriter, contract.QUERY_START, INT32, ["B + 1"]),
        past_len=declare_input(rewriter, contract.PAST_LEN, INT32, ["B"]),
        positions=positions,
        block_tables=_block_tables(rewriter, layers),
    )


def _feed(rewriter: GraphRewriter, given: Tensor, tensor: Tensor, path: str) -> None:
    """Make `given` [T] int64 the source of `tensor` [1, T], of whatever integer type."""
    batch = rewriter.value(f"{path}/batch")
    rewriter.node(f"{path}/Unsqueeze", "Unsqueeze", [given, rewriter.constant("axes/first", [0])], [batch])
    _feed_typed(rewriter, batch, tensor)


def _feed_typed(rewriter: GraphRewriter, given: Tensor, tensor: Tensor) -> None:
    rewriter.node(f"inputs/{tensor.name}/Cast", "Cast", [given], [tensor], to=element_type(tensor))


def _positions(rewriter: GraphRewriter, first_rows: int) -> Tensor:
    """Return the rows of the RoPE tables, [1, T] int64."""
    given = declare_input(rewriter, contract.POSITIONS, INT64, ["T"])
    if first_rows:
        variant = declare_input(rewriter, contract.ROPE_VARIANT, INT64, ["T"])
        offset, moved = rewriter.value("rope/offset"), rewriter.value("rope/positions")
        first = rewriter.constant("rope/first_rows", [first_rows])
        rewriter.node("rope/offset/Mul", "Mul", [variant, first], [offset])
        rewriter.node("rope/positions/Add", "Add", [given, offset], [moved])
        given = moved
    batch = rewriter.value("rope/positions/batch")
    rewriter.node("rope/Unsqueeze", "Unsqueeze", [given, rewriter.constant("axes/first", [0])], [batch])
    return batch


def _block_tables(rewriter: GraphRewriter, layers: list[Layer]) -> dict[int, Tensor]:
    tables = {}
    for window in dict.fromkeys(layer.window for layer in layers if layer.page_size):
        kind = contract.cache_kind(window)
        tables[window] = declare_input(rewriter, contract.block_table(kind), INT32, ["B", f"pages_per_sequence.{kind}"])
    return tables


def element_type(tensor: Tensor) -> int:
    """Return a tensor's element type as onnx numbers it."""
    if isinstance(tensor.dtype, int):
        return tensor.dtype
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype)))
