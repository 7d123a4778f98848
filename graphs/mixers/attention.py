"""Attention: projections, norms, RoPE, and Ortolan's operators around the cache."""

from __future__ import annotations

from ortolan.graphs.builder import Tensor
from ortolan.graphs.cached_attention import CachedAttention, attend
from ortolan.graphs.config import AttentionConfig
from ortolan.graphs.gates import Gated, gate_mul
from ortolan.graphs.kinds import LayerKind, Shapes, linear_shapes
from ortolan.graphs.parts import Columns, Normed, Parts


def weights(config: AttentionConfig, hidden_size: int) -> Shapes:
    """List the weights; a layer that shares another one's cache has neither keys nor values."""
    c, size = config, config.head_size
    query, key = c.num_heads * size, c.num_kv_heads * size
    linear = {"attention.query": (query, hidden_size, c.query_bias)}
    if c.shares_cache_with is None:
        linear["attention.key"] = (key, hidden_size, c.key_bias)
        if not c.value_is_key:
            linear["attention.value"] = (key, hidden_size, c.value_bias)
    if c.output_gate != "none":
        linear["attention.gate"] = (c.num_heads if c.gate_per_head else query, hidden_size, False)
    shapes = linear_shapes({**linear, "attention.output": (hidden_size, query, c.output_bias)})
    if c.learned_sinks:
        shapes["attention.sink_logits"] = (c.num_heads,)
    if c.qk_norm in ("head", "projection"):
        rows = {"query": query, "key": key} if c.qk_norm == "projection" else {"query": size, "key": size}
        for name in rows if c.shares_cache_with is None else ("query",):
            shapes[f"attention.{name}_norm.weight"] = (rows[name],)
    return shapes


def add(parts: Parts, index: int, x: Tensor | Normed, residual: Tensor | None) -> Tensor:
    """Add one layer's attention, [T, hidden] -> [T, hidden]."""
    config, path = parts.config.layers[index].mixer, f"layers.{index}/attention"
    sink_logits = _sink_logits(parts, path, config)
    if config.shares_cache_with is None:
        cache = CachedAttention(parts.graph, parts.options, parts.step, index, config)
        parts.attentions[index] = cache
        attended = parts.attend(cache, x, sink_logits)
    else:
        cache = parts.attentions[config.shares_cache_with]
        (flat,) = parts.projections(path, x, ("query",))
        query = parts.heads(path, config, "query", flat)
        attended = attend(cache, path, config, query, sink_logits)
    if config.output_gate != "none":
        attended = _gated(parts, path, config, attended, x)
    flat = parts.graph.reshape(f"{path}/Reshape", attended, (0, config.num_heads * config.head_size))
    return parts.linear(f"{path}/output", flat, residual)


def _gated(parts: Parts, path: str, config: AttentionConfig, attended: Tensor, x: Tensor | Normed) -> Tensor:
    """Multiply what heads return, [T, Hq, D], by a gate of the layer's input."""
    gate = parts.linear(f"{path}/gate", x)
    if parts.options.fused:
        size = config.num_heads * config.head_size
        rows = Columns(parts.graph.reshape(f"{path}/gate/Reshape", attended, (0, size)))
        gates = config.num_heads if config.gate_per_head else 0
        opened = Gated(x=rows, gates=Columns(gate), size=size, activation=config.output_gate, gate_size=gates)
        return gate_mul(parts, f"{path}/gate", opened)
    if config.output_gate == "sigmoid":
        gate = parts.graph.node(f"{path}/gate/Sigmoid", "Sigmoid", [gate])
    else:
        wide = parts.in_float32(f"{path}/gate/wide/Cast", gate)
        gate = parts.cast(f"{path}/gate/Cast", parts.graph.node(f"{path}/gate/Softplus", "Softplus", [wide]))
    size = 1 if config.gate_per_head else config.head_size
    heads = parts.graph.reshape(f"{path}/gate/Reshape", gate, (0, config.num_heads, size))
    return parts.graph.node(f"{path}/gate/Mul", "Mul", [attended, heads])


def _sink_logits(parts: Parts, path: str, config: AttentionConfig) -> Tensor | None:
    if not config.learned_sinks:
        return None
    name = f"{path}/sink_logits"
    return parts.in_float32(f"{name}/Cast", parts.weight(name.replace("/", ".")))


MIXER = LayerKind(
    weights=weights,
    add=add,
    joint={
        "attention.qkv": ("attention.query", "attention.key", "attention.value"),
        "attention.qk": ("attention.query", "attention.key"),
    },
)
