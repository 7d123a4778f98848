"""An `If` that chooses between two RoPE tables by the sequence's length, as Phi-3's long variants have it.

    If(total length > limit) -> (cos_large, sin_large) else (cos_small, sin_small)

becomes one table with the rows of both: Concat(small, large). Tokens whose sequence is longer than the limit take
their rows from behind the small table, which `rope_variant` says per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from ortolan.errors import UnsupportedModelError
from ortolan.graphs.foreign.tensors import constant_tensor


@dataclass(frozen=True, slots=True)
class RopeChoice:
    """Two tables that are one.

    Attributes:
        limit: longest sequence, tokens, that the first table serves.
        first_rows: positions of the first table; the second one follows.
        tables: names of the joined tables.
    """

    limit: int
    first_rows: int
    tables: frozenset[str]


def join_rope_tables(graph: onnx.GraphProto) -> RopeChoice | None:
    """Replace the graph's `If` nodes over tables, in place; None where it has no `If`.

    Raises:
        UnsupportedModelError: an `If` is something else.
    """
    choices = [_join(graph, node) for node in list(graph.node) if node.op_type == "If"]
    if not choices:
        return None
    first = choices[0]
    if any((other.limit, other.first_rows) != (first.limit, first.first_rows) for other in choices):
        raise UnsupportedModelError("cannot convert a graph whose RoPE tables change at different lengths")
    return RopeChoice(first.limit, first.first_rows, frozenset(name for choice in choices for name in choice.tables))


def _join(graph: onnx.GraphProto, node: onnx.NodeProto) -> RopeChoice:
    branches = {attribute.name: attribute.g for attribute in node.attribute}
    large = _branch_tables(graph, node, branches["then_branch"])
    small = _branch_tables(graph, node, branches["else_branch"])
    rows = {tensor.dims[0] if len(tensor.dims) == 2 else 0 for tensor in small}
    columns = {tuple(tensor.dims)[1:] for tensor in (*small, *large)}
    limit = _limit(graph, node)
    if len(rows) != 1 or len(columns) != 1 or min(rows) < limit:
        raise _refusal(node, f"its tables do not all hold {limit} positions or more of one size")
    where = list(graph.node).index(node)
    graph.node.remove(node)
    for output, first, second in zip(node.output, small, large, strict=True):
        joined = onnx.helper.make_node("Concat", [first.name, second.name], [output], f"{node.name}/{output}", axis=0)
        graph.node.insert(where, joined)
    return RopeChoice(limit, rows.pop(), frozenset(node.output))


def _branch_tables(graph: onnx.GraphProto, node: onnx.NodeProto, branch: onnx.GraphProto) -> list[onnx.TensorProto]:
    """Return the constants that a branch gives, as initializers of the graph."""
    inside = {tensor.name: tensor for tensor in branch.initializer}
    inside |= {inner.output[0]: constant_tensor(inner) for inner in branch.node if inner.op_type == "Constant"}
    outside = {tensor.name: tensor for tensor in graph.initializer}
    aliases = {inner.output[0]: inner.input[0] for inner in branch.node if inner.op_type == "Identity"}
    tables = []
    for value in branch.output:
        name = aliases.get(value.name, value.name)
        if name in inside:
            tensor = graph.initializer.add()
            tensor.CopyFrom(inside[name])
            tensor.name = f"{node.name}/{branch.name}/{name}"
        elif name in outside:
            tensor = outside[name]
        else:
            raise _refusal(node, f"its branch '{branch.name}' computes '{value.name}'; only constant tables are read")
        tables.append(tensor)
    return tables


def _limit(graph: onnx.GraphProto, node: onnx.NodeProto) -> int:
    """Return the longest sequence for which the condition is false."""
    producers = {name: other for other in graph.node for name in other.output}
    condition = producers.get(node.input[0])
    constants = {tensor.name: tensor for tensor in graph.initializer}
    if condition is None or condition.op_type not in ("Greater", "GreaterOrEqual"):
        raise _refusal(node, "its condition is not a comparison of the length with a limit")
    length, bound = condition.input
    if bound not in constants or not _is_total_length(producers, length):
        raise _refusal(node, "its condition is not a comparison of the attention mask's length with a limit")
    limit = int(onnx.numpy_helper.to_array(constants[bound]).reshape(-1)[0])
    return limit if condition.op_type == "Greater" else limit - 1


def _is_total_length(producers: dict[str, onnx.NodeProto], name: str) -> bool:
    """Tell whether a value is the attention mask's second dimension, or an input of that name."""
    while name in producers and producers[name].op_type in ("Cast", "Squeeze", "Reshape", "Identity"):
        name = producers[name].input[0]
    node = producers.get(name)
    if node is None:
        return name == "total_sequence_length"
    shape = producers.get(node.input[0]) if node.op_type == "Gather" else None
    return shape is not None and shape.op_type == "Shape" and shape.input[0] == "attention_mask"


def _refusal(node: onnx.NodeProto, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"cannot convert node '{node.name}', an If: {reason}")
