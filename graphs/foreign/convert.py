"""Converts a foreign decoder graph: packed tokens in, Ortolan's operators around the caches, last rows' logits out.

The tokens of all sequences stand in one batch entry, [1, T], so what treats tokens one by one stays. In order:
    1. Dead ends and other outputs than the logits go; each value is followed (`analysis`).
    2. token_ids and positions take the place of the graph's inputs.
    3. Each GroupQueryAttention becomes RoPE, RingKvAppend and SwaAttention (`layers`).
    4. The rows before the head are cut down to the last one of each sequence, unless the graph picks that itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from ortolan.contract import OPERATOR_DOMAIN, OPERATOR_VERSION
from ortolan.errors import ConfigError, UnsupportedModelError
from ortolan.graphs.foreign import gqa, head
from ortolan.graphs.foreign.analysis import Analysis, analyse
from ortolan.graphs.foreign.inputs import SourceNames, element_type, input_values, replace_inputs
from ortolan.graphs.foreign.layers import MICROSOFT, Layer, replace_attention
from ortolan.graphs.foreign.prepare import ForeignBytes, Prepared, prepare
from ortolan.graphs.foreign.values import Rows, refusal
from ortolan.graphs.fusions.rewriter import GraphRewriter, Tensor
from ortolan.graphs.options import ONNX_TYPES
from ortolan.graphs.verify import without_weights

DOC_STRING = (
    "A decoder over packed tokens, converted from another exporter's graph: sequence b owns rows query_start[b] .. "
    "query_start[b+1] of token_ids and positions. Bind each cache input and its _out output to one buffer. logits "
    "are those of the last row of each sequence."
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
    """

    max_context: int | None = None
    default_context: int = 32768
    sink: int = 0
    snapkv_window: int = 64
    page_size: int = 0
    sliding_window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A converted graph and what its manifest says.

    Attributes:
        model: its weights are declared, and not attached yet.
        weights: where the bytes of each of them lie.
        layers: in order.
        dtype: of the caches.
        vocab_size: columns of the logits.
        max_context: longest sequence, tokens.
        rope_limits: for each variant of RoPE, the longest sequence it serves; the last one is `max_context`.
    """

    model: onnx.ModelProto
    weights: Mapping[str, ForeignBytes]
    layers: tuple[Layer, ...]
    dtype: str
    vocab_size: int
    max_context: int
    rope_limits: tuple[int, ...]


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
    rewriter = _open(prepared.model)
    names = _names_inside(prepared, names)
    logits = _keep_needed(rewriter, names)
    analysis = analyse(rewriter, input_values(rewriter, names))
    vocab_size = _vocab_size(analysis, logits)
    limits = _rope_limits(rewriter, analysis, prepared, options)
    dtype = _cache_dtype(analysis)
    layers = _layers(analysis, options, ONNX_TYPES[dtype])
    first_rows = prepared.rope_choice.first_rows if prepared.rope_choice and len(limits) > 1 else 0
    step = replace_inputs(rewriter, analysis, names, layers, first_rows)
    caches = [entry for layer in layers for entry in replace_attention(rewriter, layer, step)]
    rewriter.graph.outputs = [head.cut_to_last_rows(rewriter, analysis, logits, step.query_start)]
    rewriter.graph.outputs += [tensor for _, tensor in caches]
    return Conversion(
        model=_finish(rewriter),
        weights=prepared.weights,
        layers=tuple(layers),
        dtype=dtype,
        vocab_size=vocab_size,
        max_context=limits[-1],
        rope_limits=limits,
    )


def _open(model: onnx.ModelProto) -> GraphRewriter:
    """Open a graph that onnx accepts."""
    try:
        onnx.checker.check_model(without_weights(model))
        return GraphRewriter(model)
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


def _keep_needed(rewriter: GraphRewriter, names: SourceNames) -> Tensor:
    """Drop what neither logits nor caches need; returns the logits."""
    outputs = {tensor.name: tensor for tensor in rewriter.graph.outputs}
    if names.logits not in outputs:
        raise UnsupportedModelError(
            f"cannot convert: the graph has no output '{names.logits}'; it has {', '.join(sorted(outputs)[:5])}"
        )
    if all(tensor.name != names.token_ids for tensor in rewriter.graph.inputs):
        raise UnsupportedModelError(
            f"cannot convert: the graph has no input '{names.token_ids}'; it has "
            f"{', '.join(tensor.name for tensor in rewriter.graph.inputs[:5])}"
        )
    rewriter.graph.outputs = [outputs[names.logits]]
    rewriter.sweep()
    return outputs[names.logits]


def _vocab_size(analysis: Analysis, logits: Tensor) -> int:
    rows = analysis.values[logits.name]
    if not isinstance(rows, Rows) or rows.pieces != 1 or rows.dims[-1] != rows.row_size:
        raise UnsupportedModelError(f"cannot convert: the output '{logits.name}' is not [batch, sequence, vocabulary]")
    return rows.row_size


def _rope_limits(
    rewriter: GraphRewriter, analysis: Analysis, prepared: Prepared, options: ConversionOptions
) -> tuple[int, ...]:
    """Return the longest sequence of each variant of RoPE, ascending."""
    tables = {a.rotation.cosine.name for a in analysis.attentions if a.rotation}
    for node in analysis.rotary_nodes:
        tables.add(node.inputs[1 if not node.domain else 2].name)
    choice = prepared.rope_choice
    rows = [shape[0] for name in tables if (shape := rewriter.shapes.get(name)) and shape[0] is not None]
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
    names = {int(onnx_type): name for name, onnx_type in ONNX_TYPES.items()}
    found = set()
    for attention in analysis.attentions:
        for tensor in attention.node.inputs[gqa.PAST_KEY : gqa.PAST_VALUE + 1]:
            onnx_type = element_type(tensor)
            if onnx_type not in names:
                raise refusal(
                    attention.node, f"its cache '{tensor.name}' is {tensor.dtype}; supported: {list(ONNX_TYPES)}"
                )
            found.add(names[onnx_type])
    if len(found) > 1:
        raise UnsupportedModelError(f"cannot convert a graph with caches of several types: {', '.join(sorted(found))}")
    return found.pop()


def _layers(analysis: Analysis, options: ConversionOptions, onnx_type: int) -> list[Layer]:
    layers = []
    for index, attention in enumerate(analysis.attentions):
        window = attention.window if attention.window > 0 else (options.sliding_window or -1)
        evictable = window < 0 and options.snapkv_window > 0
        layers.append(
            Layer(
                index=index,
                attention=attention,
                window=window,
                sink=options.sink,
                evictable=evictable,
                page_size=options.page_size,
                onnx_type=onnx_type,
            )
        )
    scores = {(layer.attention.scale, layer.attention.softcap) for layer in layers if layer.evictable}
    if len(scores) > 1:
        raise UnsupportedModelError(
            "cannot convert: full-attention layers differ in scale or softcap, which SnapKV reads once for all; "
            "convert with snapkv_window=0"
        )
    return layers


def _finish(rewriter: GraphRewriter) -> onnx.ModelProto:
    domains = {entry.domain for entry in rewriter.graph.import_domains}
    for domain, version in ((OPERATOR_DOMAIN, OPERATOR_VERSION), (MICROSOFT, 1)):
        if domain not in domains:
            rewriter.graph.import_domains.append(onnx.helper.make_opsetid(domain, version))
    model = rewriter.finish()
    model.graph.doc_string = DOC_STRING
    return model
