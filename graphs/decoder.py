"""Builds the decoder: one graph for prefill and decode, over packed tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from ortolan import contract
from ortolan.graphs import mlp
from ortolan.graphs.attention import Step, add_attention
from ortolan.graphs.builder import FLOAT, INT32, INT64, GraphBuilder, Tensor
from ortolan.graphs.config import ModelConfig, Rope, weight_shapes
from ortolan.graphs.options import GraphOptions
from ortolan.graphs.parts import Parts

DOC_STRING = (
    "A decoder over packed tokens: sequence b owns rows query_start[b] .. query_start[b+1] of token_ids and "
    "positions. Bind each cache input and its _out output to one buffer. logits are those of the last row of "
    "each sequence."
)


def build_model(config: ModelConfig, options: GraphOptions) -> onnx.ModelProto:
    """Build the structure of the decoder graph; weights are declared by name and attached afterwards.

    Args:
        config: the decoder.
        options: element type, sinks, and whether queries are captured.

    Returns:
        A model whose initializers are external tensors named as in `weight_shapes(config)`.
    """
    graph = GraphBuilder(config.architecture, DOC_STRING)
    parts = Parts(graph, config, options, weight_shapes(config))
    step = _declare_step(parts)
    hidden = _embed(parts, graph.input(contract.TOKEN_IDS, INT64, ["T"]))
    rotations = _rotations(parts)
    caches = []
    for index, layer in enumerate(config.layers):
        hidden, outputs = _add_layer(parts, step, index, hidden, rotations.get(layer.rope or ""))
        caches.append(outputs)
    graph.output(_logits(parts, step, hidden), contract.LOGITS, FLOAT, ["B", config.vocab_size])
    for outputs in caches:
        for name, (tensor, shape) in outputs.items():
            graph.output(tensor, contract.output(name), options.onnx_type, shape)
    return graph.finish()


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine of the step's positions, [1, T, rotary / 2] each."""

    cosine: Tensor
    sine: Tensor
    rotary_size: int


def _declare_step(parts: Parts) -> Step:
    graph = parts.graph
    return Step(
        query_start=graph.input(contract.QUERY_START, INT32, ["B + 1"]),
        past_len=graph.input(contract.PAST_LEN, INT32, ["B"]),
        block_tables=_declare_tables(parts) if parts.options.page_size else {},
    )


def _declare_tables(parts: Parts) -> dict[int, Tensor]:
    """Declare a block table for each kind of caches, by window."""
    tables = {}
    for window in dict.fromkeys(layer.window for layer in parts.config.layers):
        kind = contract.cache_kind(window)
        tables[window] = parts.graph.input(contract.block_table(kind), INT32, ["B", f"pages_per_sequence.{kind}"])
    return tables


def _embed(parts: Parts, token_ids: Tensor) -> Tensor:
    hidden = parts.graph.node("embedding/Gather", "Gather", [parts.weight("embedding.weight"), token_ids])
    if parts.config.embedding_scale != 1.0:
        scale = parts.scalar("embedding/scale", parts.config.embedding_scale)
        hidden = parts.graph.node("embedding/Mul", "Mul", [hidden, scale])
    return hidden


def _rotations(parts: Parts) -> dict[str, Rotation]:
    """Compute cosine and sine once for every rope, in float32 whatever the model's type."""
    graph, ropes = parts.graph, parts.config.ropes
    if not ropes:
        return {}
    positions = graph.node("rope/Cast", "Cast", [graph.input(contract.POSITIONS, INT64, ["T"])], {"to": FLOAT})
    axis = graph.constant("axes/last", [1], np.int64)
    column = graph.node("rope/Unsqueeze", "Unsqueeze", [positions, axis])
    variant = None
    if len(ropes[0].variants) > 1:
        variant = graph.input(contract.ROPE_VARIANT, INT64, ["T"])
    return {rope.name: _rotation(parts, rope, column, variant) for rope in ropes}


def _rotation(parts: Parts, rope: Rope, column: Tensor, variant: Tensor | None) -> Rotation:
    graph, name = parts.graph, f"rope.{rope.name}"
    table = np.array([v.inv_freq for v in rope.variants], np.float32)
    factors = np.array([[v.attention_factor] for v in rope.variants], np.float32)
    frequencies = graph.constant(f"{name}/inv_freq", table, np.float32)
    factor = graph.constant(f"{name}/attention_factor", factors, np.float32)
    if variant is not None:
        frequencies = graph.node(f"{name}/inv_freq_of_variant", "Gather", [frequencies, variant])
        factor = graph.node(f"{name}/factor_of_variant", "Gather", [factor, variant])
    angles = graph.node(f"{name}/Mul", "Mul", [column, frequencies])
    values = []
    for function in ("Cos", "Sin"):
        value = graph.node(f"{name}/{function}", function, [angles])
        if np.any(factors != 1):
            value = graph.node(f"{name}/{function}/Mul", "Mul", [value, factor])
        value = parts.cast(f"{name}/{function}/Cast", value)
        first = graph.constant("axes/first", [0], np.int64)
        values.append(graph.node(f"{name}/{function}/Unsqueeze", "Unsqueeze", [value, first]))
    return Rotation(values[0], values[1], rope.rotary_size)


def _add_layer(
    parts: Parts, step: Step, index: int, hidden: Tensor, rotation: Rotation | None
) -> tuple[Tensor, dict[str, tuple[Tensor, list[int | str]]]]:
    """Add one layer; returns the hidden state and the caches it updated."""
    path = f"layers.{index}"
    placement = parts.config.norm_placement
    before, after = placement in ("pre", "sandwich"), placement in ("post", "sandwich")
    branch = parts.norm(f"{path}/attention_norm", hidden) if before else hidden
    branch, caches = add_attention(parts, step, index, branch, rotation)
    if after:
        branch = parts.norm(f"{path}/attention_post_norm", branch)
    hidden = parts.graph.node(f"{path}/attention_residual/Add", "Add", [hidden, branch])
    branch = parts.norm(f"{path}/mlp_norm", hidden) if before else hidden
    branch = mlp.add_mlp(parts, f"{path}/mlp", branch)
    if after:
        branch = parts.norm(f"{path}/mlp_post_norm", branch)
    return parts.graph.node(f"{path}/mlp_residual/Add", "Add", [hidden, branch]), caches


def _logits(parts: Parts, step: Step, hidden: Tensor) -> Tensor:
    """Project the last row of each sequence; the rows are picked before the norm and the head."""
    graph, config = parts.graph, parts.config
    one, end = graph.constant("slice/one", [1], np.int64), graph.constant("slice/end", [2**31 - 1], np.int64)
    ends = graph.node("head/ends", "Slice", [step.query_start, one, end])
    last = graph.node("head/last_rows", "Sub", [ends, graph.constant("head/one", 1, np.int32)])
    rows = graph.node("head/Gather", "Gather", [hidden, last])
    normed = parts.norm("final_norm", rows)
    name = "embedding.weight" if config.tied_embeddings else "head.weight"
    logits = graph.node("head/Gemm", "Gemm", [normed, parts.weight(name)], {"transB": 1})
    if parts.options.onnx_type != FLOAT:
        logits = graph.node("head/Cast", "Cast", [logits], {"to": FLOAT})
    if config.logit_softcap:
        cap = graph.constant("head/softcap", config.logit_softcap, np.float32)
        logits = graph.node("head/softcap/Div", "Div", [logits, cap])
        logits = graph.node("head/softcap/Tanh", "Tanh", [logits])
        logits = graph.node("head/softcap/Mul", "Mul", [logits, cap])
    return logits
