"""Puts Ortolan's operators in the place of one attention node."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortolan.graphs.builder import FLOAT, MICROSOFT, GraphBuilder, Tensor
from ortolan.graphs.cached_attention import CachedAttention, attend
from ortolan.graphs.foreign.gqa import QUERY, VALUE, Attention


def replace_attention(graph: GraphBuilder, attention: Attention, cache: CachedAttention, positions: Tensor) -> None:
    """Replace one attention node.

    Args:
        graph: that has the node.
        attention: what it computes.
        cache: of the layer.
        positions: [1, T] int64, rows of the RoPE tables; None where nothing rotates.
    """
    config, path = cache.config, cache.path
    query, key, value = _heads(graph, attention, cache, positions)
    cache.append(key, value)
    attended = attend(cache, path, config, query, _sink_logits(graph, attention, path))
    cache.capture(query)
    flat = graph.reshape(f"{path}/Reshape", attended, (1, -1, config.num_heads * config.head_size))
    graph.replace(attention.node.outputs[0], flat)


def _heads(graph: GraphBuilder, attention: Attention, cache: CachedAttention, positions: Tensor) -> list[Tensor]:
    """Return queries [T, Hq, D], keys and values [T, Hkv, D], normalised and rotated."""
    config, path = cache.config, cache.path
    counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    tensors = attention.node.inputs[QUERY : VALUE + 1]
    if attention.is_packed:
        sizes = [count * config.head_size for count in counts]
        constant = graph.constant("sizes/" + "x".join(map(str, sizes)), sizes, np.int64)
        tensors = graph.nodes(f"{path}/Split", "Split", [tensors[0], constant], 3, {"axis": -1})
    heads = []
    for tensor, name, count in zip(tensors, ("query", "key", "value"), counts, strict=True):
        part = tensor
        if name != "value":
            part = _normalise(graph, attention, part, f"{path}/{name}", count)
            part = _rotate(graph, attention, part, f"{path}/{name}", positions, count)
        heads.append(graph.reshape(f"{path}/{name}/Reshape", part, (-1, count, config.head_size)))
    return heads


def _normalise(graph: GraphBuilder, attention: Attention, tensor: Tensor, part: str, count: int) -> Tensor:
    norm, size = attention.norm, attention.config.head_size
    if norm is None:
        return tensor
    path = f"{part}_norm"
    split = graph.reshape(f"{path}/Reshape", tensor, (1, -1, size))
    weight = norm.query_weight if part.endswith("query") else norm.key_weight
    attributes: dict[str, Any] = {"axis": -1, "epsilon": norm.epsilon, "stash_type": FLOAT}
    normed = graph.node(path, "SimplifiedLayerNormalization", [split, weight], attributes)
    return graph.reshape(f"{path}/flatten", normed, (1, -1, count * size))


def _rotate(
    graph: GraphBuilder, attention: Attention, tensor: Tensor, part: str, positions: Tensor, count: int
) -> Tensor:
    rotation = attention.rotation
    if rotation is None:
        return tensor
    attributes: dict[str, Any] = {"num_heads": count, "interleaved": rotation.interleaved}
    if rotation.rotary_size != attention.config.head_size:
        attributes["rotary_embedding_dim"] = rotation.rotary_size
    inputs = [tensor, positions, rotation.cosine, rotation.sine]
    return graph.node(f"{part}/RotaryEmbedding", "RotaryEmbedding", inputs, attributes, MICROSOFT)


def _sink_logits(graph: GraphBuilder, attention: Attention, path: str) -> Tensor | None:
    """Return float32 logits [Hq] that join the softmax's denominator."""
    if attention.sinks is not None:
        return graph.node(f"{path}/sink_logits/Cast", "Cast", [attention.sinks], {"to": FLOAT})
    return graph.constant("sinks/zero", [0.0] * attention.config.num_heads, np.float32) if attention.smooth else None
