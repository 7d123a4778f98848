"""Converts a foreign decoder graph: packed tokens in, Ortolan's operators around the caches, wanted rows' logits out.

The tokens of all sequences stand in one batch entry, [1, T], so what treats tokens one by one stays. In order:
    1. Dead ends and other outputs than the logits go; each value is followed (`analysis`). Where the graph can be told
       in the builder's terms (`describe`), a fused graph over the same weights is built of that (`fused`).
    2. token_ids and positions take the place of the graph's inputs.
    3. The rows before the head are cut down to those that logit_rows names.
    4. Each GroupQueryAttention becomes RoPE, RingKvAppend and SwaAttention (`layers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx

from ortolan.element_types import COMPUTE_TYPES, from_onnx
from ortolan.errors import ConfigError, UnsupportedModelError
from ortolan.graphs.builder import GraphBuilder, Tensor
from ortolan.graphs.cached_attention import CachedAttention, declare_step
from ortolan.graphs.config import AttentionConfig
from ortolan.graphs.foreign import gqa, head
from ortolan.graphs.foreign.analysis import Analysis, analyse
from ortolan.graphs.foreign.describe import describe
from ortolan.graphs.foreign.fused import FusedConversion, build_fused
from ortolan.graphs.foreign.inputs import SourceNames, input_values, onnx_type, replace_inputs
from ortolan.graphs.foreign.layers import replace_attention
from ortolan.graphs.foreign.prepare import ForeignBytes, Prepared, prepare
from ortolan.graphs.foreign.values import Rows, refusal
from ortolan.graphs.options import GraphOptions
from ortolan.graphs.verify import without_weights

_SAME_NUMBERS = frozenset(("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
DOC_STRING = (
    "A decoder over packed tokens, converted from another exporter's graph: sequence b owns rows query_start[b] .. "
    "query_start[b+1] of token_ids and positions. Bind each cache input and its _out output to one buffer. logits "
    "are those of the rows that logit_rows names."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions:
    """Options of `convert_model`.

    Attributes:
        max_context: longest sequence, tokens; None takes what the RoPE tables hold, at most `default_context`.
        default_context: see `max_context`.
        sink: first positions that every layer keeps and sees.
        snapkv_window: above 0, full-attention layers capture queries and take a physical length.
        page_size: slots of a page; 0 makes contiguous caches.
        sliding_window: window of the layers whose attention has none; 0 leaves them as they are.
        fuse: whether fused graphs are built, too, where the form of the source allows it.
    """

    max_context: int | None = None
    default_context: int = 32768
    sink: int = 0
    snapkv_window: int = 64
    page_size: int = 0
    sliding_window: int = 0
    fuse: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A converted graph and what its manifest says.

    Attributes:
        model: its weights are declared, and not attached yet.
        fused: the fused graphs and how they read the weights; None where there are none.
        weights: where the bytes of each of them lie.
        layers: in order.
        options: of its caches.
        vocab_size: columns of the logits.
        max_context: longest sequence, tokens.
        rope_limits: for each variant of RoPE, the longest sequence it serves; the last one is `max_context`.
        weight_format: of its linear weights; "mixed" where they differ.
    """

    model: onnx.ModelProto
    fused: FusedConversion | None
    weights: Mapping[str, ForeignBytes]
    layers: tuple[AttentionConfig, ...]
    options: GraphOptions
    vocab_size: int
    max_context: int
    rope_limits: tuple[int, ...]
    weight_format: str


def convert_model(source: onnx.ModelProto, names: SourceNames, options: ConversionOptions) -> Conversion:
    """Convert a decoder graph of another exporter.

    Args:
        source: the graph, without external data; it is not changed.
        names: of its inputs and outputs.
        options: lengths and caches.

    Raises:
        UnsupportedModelError: a node stands in the way; the message names it.
        CheckpointError: a weight does not say where its bytes lie.
        ConfigError: max_context is more than the graph's tables hold.
    """
    prepared = prepare(source)
    graph = _open(prepared.model)
    names = _names_inside(prepared, names)
    logits = _keep_needed(graph, names)
    analysis = analyse(graph, input_values(graph, names))
    vocab_size = _vocab_size(analysis, logits)
    limits = _rope_limits(graph, _position_tables(graph, analysis, names), prepared, options)
    dtype = _cache_dtype(analysis)
    graph_options = GraphOptions(
        dtype=dtype, sink=options.sink, snapkv_window=options.snapkv_window, page_size=options.page_size
    )
    layers = tuple(_layer(attention.config, options) for attention in analysis.attentions)
    first_rows = prepared.rope_choice.first_rows if prepared.rope_choice and len(limits) > 1 else 0
    description = describe(graph, analysis, logits, layers, first_rows) if options.fuse else None
    fused = None if description is None else build_fused(graph, prepared.weights, description, graph_options)
    positions = replace_inputs(graph, analysis, names, first_rows)
    step = declare_step(graph, graph_options, [layer.window for layer in layers])
    graph.graph.outputs = []
    head.cut_to_rows(graph, analysis, logits, step.logit_rows)
    for index, (attention, layer) in enumerate(zip(analysis.attentions, layers, strict=True)):
        cache = CachedAttention(graph, graph_options, step, index, layer)
        replace_attention(graph, attention, cache, positions)
        cache.declare_outputs()
    return Conversion(
        model=graph.finish(),
        fused=fused,
        weights=prepared.weights,
        layers=layers,
        options=graph_options,
        vocab_size=vocab_size,
        max_context=limits[-1],
        rope_limits=limits,
        weight_format=_weight_format(graph),
    )


def _open(model: onnx.ModelProto) -> GraphBuilder:
    """Open a graph that onnx accepts."""
    try:
        onnx.checker.check_model(without_weights(model))
        return GraphBuilder.open(model, DOC_STRING)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise UnsupportedModelError(
            f"cannot convert: onnx rejects the graph: {' '.join(str(error).split())}"
        ) from error


def _names_inside(prepared: Prepared, names: SourceNames) -> SourceNames:
    given = prepared.names
    return SourceNames(
        token_ids=given.get(names.token_ids, names.token_ids),
        positions=given.get(names.positions, names.positions),
        logits=given.get(names.logits, names.logits),
    )


def _keep_needed(graph: GraphBuilder, names: SourceNames) -> Tensor:
    """Drop what neither logits nor caches need; returns the logits."""
    outputs = {tensor.name: tensor for tensor in graph.graph.outputs}
    if names.logits not in outputs:
        raise UnsupportedModelError(
            f"cannot convert: the graph has no output '{names.logits}'; it has {', '.join(sorted(outputs)[:5])}"
        )
    if all(tensor.name != names.token_ids for tensor in graph.graph.inputs):
        raise UnsupportedModelError(
            f"cannot convert: the graph has no input '{names.token_ids}'; it has "
            f"{', '.join(tensor.name for tensor in graph.graph.inputs[:5])}"
        )
    graph.graph.outputs = [outputs[names.logits]]
    graph.sweep()
    return outputs[names.logits]


def _vocab_size(analysis: Analysis, logits: Tensor) -> int:
    rows = analysis.values[logits.name]
    if not isinstance(rows, Rows) or rows.pieces != 1 or rows.dims[-1] != rows.row_size:
        raise UnsupportedModelError(f"cannot convert: the output '{logits.name}' is not [batch, sequence, vocabulary]")
    return rows.row_size


def _position_tables(graph: GraphBuilder, analysis: Analysis, names: SourceNames) -> set[str]:
    """Name the tables that have a row for each position: those of RoPE, and what is looked up by positions."""
    tables = {a.rotation.cosine.name for a in analysis.attentions if a.rotation}
    for node in analysis.rotary_nodes:
        tables.add(node.inputs[1 if not node.domain else 2].name)
    followed = [tensor for tensor in graph.graph.inputs if tensor.name == names.positions]
    for tensor in followed:
        for node in tensor.outputs:
            if node.op == "Gather" and node.inputs[1] is tensor:
                tables.add(node.inputs[0].name)
            elif node.op in _SAME_NUMBERS and node.inputs[0] is tensor:
                followed.append(node.outputs[0])
    return tables


def _rope_limits(
    graph: GraphBuilder, tables: set[str], prepared: Prepared, options: ConversionOptions
) -> tuple[int, ...]:
    """Return the longest sequence of each variant of RoPE, ascending; `tables` have a row for each position."""
    choice = prepared.rope_choice
    rows = [shape[0] for name in tables if (shape := graph.shapes.get(name)) and shape[0] is not None]
    longest = min(rows, default=None) if len(rows) == len(tables) else 0
    if longest == 0:
        raise UnsupportedModelError(f"cannot convert: the number of positions in {sorted(tables)} is not known")
    if choice is not None and longest is not None:
        if not tables <= choice.tables:
            raise UnsupportedModelError("cannot convert a graph where only some layers change their RoPE table")
        longest -= choice.first_rows
    context = _context(longest, options)
    if choice is None or context <= choice.limit:
        return (context,)
    return choice.limit, context


def _context(longest: int | None, options: ConversionOptions) -> int:
    if options.max_context is None:
        return min(longest or options.default_context, options.default_context)
    if longest is not None and options.max_context > longest:
        raise ConfigError(
            f"max_context {options.max_context} is more than the {longest} positions of the graph's RoPE tables; "
            "choose at most that, or export the source for more"
        )
    return options.max_context


def _cache_dtype(analysis: Analysis) -> str:
    found = set()
    for attention in analysis.attentions:
        for tensor in attention.node.inputs[gqa.PAST_KEY : gqa.PAST_VALUE + 1]:
            name = from_onnx(onnx_type(tensor)).name
            if name not in COMPUTE_TYPES:
                raise refusal(
                    attention.node, f"its cache '{tensor.name}' is {name}; supported: {', '.join(COMPUTE_TYPES)}"
                )
            found.add(name)
    if len(found) > 1:
        raise UnsupportedModelError(f"cannot convert a graph with caches of several types: {', '.join(sorted(found))}")
    return found.pop()


def _weight_format(graph: GraphBuilder) -> str:
    """Name the format of the graph's linear weights."""
    packed = any(node.op in ("MatMulNBits", "DequantizeLinear") for node in graph.graph.nodes)
    dense = any(
        node.op in ("MatMul", "FusedMatMul", "Gemm") and node.inputs[1].name in graph.weights
        for node in graph.graph.nodes
    )
    return "mixed" if packed and dense else "blocks" if packed else "dense"


def _layer(config: AttentionConfig, options: ConversionOptions) -> AttentionConfig:
    """Give a layer without a window the one that the caller asks for."""
    return replace(config, window=config.window if config.window > 0 else (options.sliding_window or -1))
