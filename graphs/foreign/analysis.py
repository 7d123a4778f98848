"""Follows the tokens through a foreign graph, and collects its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from ortolan.errors import UnsupportedModelError
from ortolan.graphs.builder import GraphBuilder, Node, Tensor
from ortolan.graphs.foreign import gqa
from ortolan.graphs.foreign.rules import infer_rows
from ortolan.graphs.foreign.shape_values import Contents, evaluate
from ortolan.graphs.foreign.values import Kind, Rows, Value, View, refusal

_OTHER_ATTENTION = frozenset((
    "Attention", "DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention", "LinearAttention",
    "MultiHeadAttention", "PackedAttention", "PackedMultiHeadAttention", "PagedAttention", "SparseAttention",
))  # fmt: skip


@dataclass(slots=True)
class Analysis:
    """What a graph's values are, and its attention layers in graph order.

    Attributes:
        contents: of shapes that the graph computes, by name.
        rotary_nodes: what rotates outside attention.
        last_token_nodes: what picks the last token of each sequence.
    """

    values: dict[str, Value]
    attentions: list[gqa.Attention] = field(default_factory=list)
    contents: dict[str, Contents] = field(default_factory=dict)
    rotary_nodes: list[Node] = field(default_factory=list)
    last_token_nodes: list[Node] = field(default_factory=list)


def analyse(graph: GraphBuilder, inputs: Mapping[str, Value]) -> Analysis:
    """Find out what each value is.

    Args:
        graph: the graph, sorted and without dead nodes.
        inputs: what the graph's inputs are, by name.

    Raises:
        UnsupportedModelError: a node may mix tokens, or attends in a way that cannot be kept; the message names it.
    """
    _check_operators(graph)
    analysis = Analysis(dict(inputs))
    for name in graph.weights:
        analysis.values[name] = Kind.CONSTANT
    for node in graph.graph.nodes:
        given = tuple(_value(analysis, tensor) for tensor in node.inputs)
        view = View(node, given, graph.shapes, analysis.contents)
        for tensor, value in zip(node.outputs, _outputs(analysis, view), strict=True):
            analysis.values[tensor.name] = value
        contents = evaluate(view)
        if contents is not None:
            analysis.contents[node.outputs[0].name] = contents
    if not analysis.attentions:
        raise UnsupportedModelError("cannot convert: the graph has no GroupQueryAttention that its outputs need")
    _check_caches(graph, analysis)
    return analysis


def _check_operators(graph: GraphBuilder) -> None:
    """Refuse other attention before anything around it is judged."""
    for node in graph.graph.nodes:
        if node.op in _OTHER_ATTENTION:
            raise refusal(node, f"only {gqa.OPERATOR} is read; export the model with it")


def _value(analysis: Analysis, tensor: Tensor) -> Value | None:
    if isinstance(tensor, gs.Constant):
        return Kind.CONSTANT
    return analysis.values[tensor.name] if tensor.name else None


def _outputs(analysis: Analysis, view: View) -> list[Value]:
    node = view.node
    if node.op == gqa.OPERATOR:
        attention = gqa.read_attention(view)
        analysis.attentions.append(attention)
        size = attention.config.num_heads * attention.config.head_size
        return [Rows((1, None, size), size), *[Kind.CACHE] * (len(node.outputs) - 1)]
    if Kind.CACHE in view.values:
        raise view.refuse(f"it reads a key/value cache, which only {gqa.OPERATOR} may")
    if node.op == "RotaryEmbedding" and any(isinstance(value, Rows) for value in view.values):
        analysis.rotary_nodes.append(node)
    outputs = infer_rows(view)
    before = any(isinstance(value, Rows) and not value.is_last for value in view.values)
    if before and any(isinstance(value, Rows) and value.is_last for value in outputs):
        analysis.last_token_nodes.append(node)
    return outputs


def _check_caches(graph: GraphBuilder, analysis: Analysis) -> None:
    """Check that each cache belongs to one layer."""
    for attention in analysis.attentions:
        node = attention.node
        for tensor in (node.inputs[gqa.PAST_KEY], node.inputs[gqa.PAST_VALUE]):
            if len(tensor.outputs) != 1 or not any(tensor is given for given in graph.graph.inputs):
                raise UnsupportedModelError(
                    f"cannot convert node '{node.name}', a {node.op}: other nodes read its cache '{tensor.name}' too"
                )
