"""Builds the decoder: one graph for prefill and decode, over packed tokens."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import onnx

from ortolan import contract
from ortolan.custom_ops.fused_schema import FUSED_OPERATORS
from ortolan.graphs.builder import FLOAT, INT64, GraphBuilder, Tensor
from ortolan.graphs.cached_attention import declare_step
from ortolan.graphs.config import AttentionConfig, ModelConfig
from ortolan.graphs.formats.dense import Dense
from ortolan.graphs.fused_parts import FusedParts
from ortolan.graphs.kinds import LayerKind
from ortolan.graphs.layer_inputs import add_layer_input, prepare_layer_inputs
from ortolan.graphs.mixers import MIXERS
from ortolan.graphs.mlps import MLPS
from ortolan.graphs.options import GraphOptions
from ortolan.graphs.parts import Formats, Linear, Normed, Parts
from ortolan.graphs.readers import NARROW, drop_rows, first_reader
from ortolan.graphs.rope import ANGLES, add_rotations, list_late
from ortolan.graphs.weights import joint_shapes, shared_shapes, weight_shapes

FUSIONS_METADATA = "ortolan.fusions"
DOC_STRING = (
    "A decoder over packed tokens: sequence b owns rows query_start[b] .. query_start[b+1] of token_ids and "
    "positions. Bind each cache input and its _out output to one buffer. logits are those of the rows that "
    "logit_rows names."
)
FUSED_DOC_STRING = " Fused for {}: computes what model.onnx does, over the same weights and the same bindings."
_PLAIN = ("Gemm", "RMSNormalization", "RotaryEmbedding", "RingKvAppend")


def build_model(config: ModelConfig, options: GraphOptions, formats: Formats | None = None) -> onnx.ModelProto:
    """Build the structure of the decoder graph; weights are declared by name and attached afterwards.

    Args:
        config: the decoder.
        options: element types, sinks, whether queries are captured, and whether operators are fused.
        formats: of linear weights; None: all are dense.

    Returns:
        A model whose initializers are external tensors: those of `weight_shapes(config)`, with those of
        `joint_weights(config)` in the place of their members where the graph reads them as one: query, key and value,
        in a fused graph also gate and up. A fused graph's metadata `ortolan.fusions` counts fused operators, and plain
        ones that are left.
    """
    device = options.fused_for
    described = DOC_STRING + (FUSED_DOC_STRING.format(device.upper()) if device else "")
    graph = GraphBuilder(config.architecture, described)
    formats = formats or Formats(default=Dense())
    shapes = weight_shapes(config) | shared_shapes(config) | joint_shapes(config)
    parts = (FusedParts if options.fused else Parts)(graph, config, options, shapes, formats)
    attentions = [layer.mixer for layer in config.layers if isinstance(layer.mixer, AttentionConfig)]
    states = [layer.mixer.kind for layer in config.layers if not isinstance(layer.mixer, AttentionConfig)]
    parts.step = declare_step(graph, options, [mixer.window for mixer in attentions], states)
    token_ids = graph.input(contract.TOKEN_IDS, INT64, ["T"])
    hidden = _embed(parts, token_ids)
    if config.drafts:
        hidden = _join_hidden(parts, hidden)
    add_rotations(parts)
    shares = prepare_layer_inputs(parts, token_ids, hidden) if config.layer_inputs else None
    for index in range(len(config.layers)):
        if index == first_reader(config):
            hidden, *others = drop_rows(parts, [hidden] if shares is None else [hidden, shares])
            shares = others[0] if others else None
        hidden = _add_layer(parts, index, hidden)
        hidden = hidden if shares is None else add_layer_input(parts, index, hidden, shares)
        hidden = _scale(parts, index, hidden)
    if config.gives_hidden:
        hidden = parts.value(parts.norm("final_norm", hidden))
        graph.output(hidden, contract.HIDDEN_OUT, options.onnx_type, ["T", config.hidden_size])
    graph.output(_logits(parts, hidden), contract.LOGITS, FLOAT, ["R", config.vocab_size])
    for cache in (*parts.attentions.values(), *parts.states.values()):
        cache.declare_outputs()
    model = graph.finish()
    if options.fused:
        list_late(model.graph, (ANGLES, NARROW))
        model.metadata_props.add(key=FUSIONS_METADATA, value=json.dumps(count_fusions(model)))
    return model


def count_fusions(model: onnx.ModelProto) -> dict[str, int]:
    """Count the fused operators of a graph, and the plain ones that they could stand for."""
    counts = Counter(node.op_type for node in model.graph.node)
    fused = [operator.name for operator in FUSED_OPERATORS]
    return {name: counts[name] for name in (*fused, *_PLAIN)}


def _embed(parts: Parts, token_ids: Tensor) -> Tensor:
    if parts.formats.lookup is None:
        hidden = parts.look_up("embedding", parts.weight("embedding.weight"), token_ids)
    else:
        hidden = parts.formats.lookup.rows(parts, "embedding", token_ids)
    if parts.config.embedding_scale != 1.0:
        scale = parts.scalar("embedding/scale", parts.config.embedding_scale)
        hidden = parts.graph.node("embedding/Mul", "Mul", [hidden, scale])
    if parts.config.embedding_norm:
        ones = parts.ones(parts.config.hidden_size)
        hidden = parts.rms_norm("embedding/norm", hidden, ones, parts.config.norm_epsilon)
    return hidden


def _join_hidden(parts: Parts, embedded: Tensor) -> Tensor:
    """Project a token's embedding and the hidden state before it, both normalised, to one state [T, hidden]."""
    graph, size = parts.graph, parts.config.hidden_size
    given = graph.input(contract.HIDDEN, parts.options.onnx_type, ["T", size])
    both = [parts.value(parts.norm("mtp/embedding_norm", embedded)), parts.value(parts.norm("mtp/hidden_norm", given))]
    return parts.linear("mtp/input", graph.node("mtp/Concat", "Concat", both, {"axis": 1}))


def _add_layer(parts: Parts, index: int, hidden: Tensor) -> Tensor:
    """Add one layer, [T, hidden] -> [T, hidden]."""
    layer = parts.config.layers[index]
    if parts.config.placement(index) == "parallel":
        normed = parts.norm(f"layers.{index}/attention_norm", hidden)
        hidden = MIXERS[layer.mixer.kind].add(parts, index, normed, hidden)
        return MLPS[layer.mlp.kind].add(parts, index, normed, hidden)
    hidden = _add_branch(parts, index, "attention", MIXERS[layer.mixer.kind], hidden)
    return _add_branch(parts, index, "mlp", MLPS[layer.mlp.kind], hidden)


def _scale(parts: Parts, index: int, hidden: Tensor) -> Tensor:
    """Multiply what a layer returns by its scalar, where it has one."""
    if not parts.config.layers[index].scaled:
        return hidden
    return parts.scale(f"layers.{index}/scale", hidden, parts.weight(f"layers.{index}.scale"))


def _add_branch(parts: Parts, index: int, name: str, kind: LayerKind, hidden: Tensor) -> Tensor:
    """Add what is done to a normalised hidden state, and the residual."""
    path, placement = f"layers.{index}", parts.config.placement(index)
    x: Tensor | Normed = hidden if placement == "post" else parts.norm(f"{path}/{name}_norm", hidden)
    if placement == "pre" and parts.config.residual_scale == 1.0:
        return kind.add(parts, index, x, hidden)
    branch = kind.add(parts, index, x, None)
    if parts.config.residual_scale != 1.0:
        scale = parts.scalar(f"{path}/{name}_scale", parts.config.residual_scale)
        branch = parts.graph.node(f"{path}/{name}_scale/Mul", "Mul", [branch, scale])
    if placement == "pre":
        return parts.add_residual(f"{path}/{name}_residual", branch, hidden)
    return parts.norm_add(f"{path}/{name}_residual", parts.post_norm(f"{path}/{name}_post_norm", branch), hidden)


def _logits(parts: Parts, hidden: Tensor) -> Tensor:
    """Project the rows whose logits are wanted, which are picked before the head at the latest.

    They are normalised first, unless all rows are that already, for a draft head.
    """
    graph, config = parts.graph, parts.config
    if parts.row_axis == "T":
        hidden = parts.rows("head", hidden, parts.step.logit_rows)
    normed = hidden if config.gives_hidden else parts.norm("final_norm", hidden)
    stem = "embedding" if config.tied_embeddings else "head"
    logits = parts.add_linear(Linear(path="head", stem=stem, x=normed, in_float32=True))
    if config.logit_divisor != 1.0:
        divisor = graph.constant("head/divisor", config.logit_divisor, np.float32)
        logits = graph.node("head/divisor/Div", "Div", [logits, divisor])
    if config.logit_softcap:
        cap = graph.constant("head/softcap", config.logit_softcap, np.float32)
        logits = graph.node("head/softcap/Div", "Div", [logits, cap])
        logits = graph.node("head/softcap/Tanh", "Tanh", [logits])
        logits = graph.node("head/softcap/Mul", "Mul", [logits, cap])
    return logits
