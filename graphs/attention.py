"""The attention of a decoder layer: projections, norms, RoPE, and Ortolan's operators around the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ortolan import contract
from ortolan.graphs.builder import FLOAT, INT32, Tensor, emitters
from ortolan.graphs.parts import Parts

Caches: TypeAlias = dict[str, tuple[Tensor, list[int | str]]]


class RotationLike(Protocol):
    """Cosine and sine of the step's positions, [1, T, rotary / 2] each."""

    @property
    def cosine(self) -> Tensor:
        """[1, T, rotary / 2]."""

    @property
    def sine(self) -> Tensor:
        """[1, T, rotary / 2]."""

    @property
    def rotary_size(self) -> int:
        """Elements of a head that are rotated."""


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs that describe one step's packed sequences."""

    query_start: Tensor  # [B+1] int32
    past_len: Tensor  # [B] int32
    block_tables: Mapping[int, Tensor]  # by window, [B, M] int32; empty where caches are contiguous

    def paging(self, window: int) -> dict[str, Tensor]:
        """Return the block table of layers with this window as an operator's input; none for contiguous caches."""
        return {"block_table": self.block_tables[window]} if self.block_tables else {}


def add_attention(
    parts: Parts, step: Step, index: int, hidden: Tensor, rotation: RotationLike | None
) -> tuple[Tensor, Caches]:
    """Add one layer's attention; returns its output [T, hidden] and the caches it updated, by input name."""
    config, layer = parts.config, parts.config.layers[index]
    path, size = f"layers.{index}/attention", config.head_size
    query = _heads(parts, f"{path}/query", hidden, config.num_heads, rotation)
    key = _heads(parts, f"{path}/key", hidden, config.num_kv_heads, rotation)
    value = parts.reshape(
        f"{path}/value/Reshape", parts.linear(f"{path}/value", hidden), (0, config.num_kv_heads, size)
    )
    evictable = layer.window < 0 and parts.options.snapkv_window > 0
    past = step.past_len
    if evictable:
        past = parts.graph.input(contract.kv_len(index), INT32, ["B", config.num_kv_heads])
    caches = _append(parts, step, index, (key, value), past)
    attended = _attend(parts, step, index, query, past, caches)
    if evictable:
        caches |= _capture(parts, step, index, query)
    flat = parts.reshape(f"{path}/Reshape", attended, (0, config.num_heads * size))
    return parts.linear(f"{path}/output", flat), caches


def _heads(parts: Parts, path: str, hidden: Tensor, heads: int, rotation: RotationLike | None) -> Tensor:
    """Project, normalise and rotate: [T, hidden] -> [T, heads, D]."""
    size, kind = parts.config.head_size, parts.config.qk_norm
    flat = parts.linear(path, hidden)
    if kind == "projection":
        flat = parts.norm(f"{path}_norm", flat)
    if kind == "head":
        split = parts.norm(f"{path}_norm", parts.reshape(f"{path}/Reshape", flat, (0, heads, size)))
        if rotation is None:
            return split
        flat = parts.reshape(f"{path}/flatten/Reshape", split, (1, -1, heads * size))
    elif rotation is None:
        return parts.reshape(f"{path}/Reshape", flat, (0, heads, size))
    else:
        flat = parts.reshape(f"{path}/flatten/Reshape", flat, (1, -1, heads * size))
    attributes = {"num_heads": heads, "interleaved": 0}
    if rotation.rotary_size != size:
        attributes["rotary_embedding_dim"] = rotation.rotary_size
    inputs = [flat, rotation.cosine, rotation.sine]
    rotated = parts.graph.node(f"{path}/RotaryEmbedding", "RotaryEmbedding", inputs, attributes)
    return parts.reshape(f"{path}/rotated/Reshape", rotated, (-1, heads, size))


def _append(parts: Parts, step: Step, index: int, new: tuple[Tensor, Tensor], past: Tensor) -> Caches:
    config, dtype = parts.config, parts.options.onnx_type
    shape = cache_shape(parts, index)
    names = contract.key_cache(index), contract.value_cache(index)
    old = [parts.graph.input(name, dtype, shape) for name in names]
    updated = parts.graph.operator(
        f"layers.{index}/attention/RingKvAppend",
        emitters.ring_kv_append,
        {
            "key": new[0],
            "value": new[1],
            "key_cache": old[0],
            "value_cache": old[1],
            "query_start": step.query_start,
            "past_len": past,
            **step.paging(config.layers[index].window),
        },
        num_outputs=2,
        sink=parts.options.sink,
    )
    return {name: (tensor, shape) for name, tensor in zip(names, updated, strict=True)}


def cache_shape(parts: Parts, index: int) -> list[int | str]:
    """Return the shape of one layer's key or value cache, [N, Hkv, P, D]."""
    config, page_size = parts.config, parts.options.page_size
    if not page_size:
        return [f"pages_{index}", config.num_kv_heads, f"slots_{index}", config.head_size]
    kind = contract.cache_kind(config.layers[index].window)
    return [f"pages.{kind}", config.num_kv_heads, page_size, config.head_size]


def _attend(parts: Parts, step: Step, index: int, query: Tensor, past: Tensor, caches: Caches) -> Tensor:
    """Attend over the *output* caches: reading the inputs would not be ordered after the append."""
    sink_logits = {}
    if parts.config.learned_sinks:
        path = f"layers.{index}/attention/sink_logits"
        logits = parts.weight(path.replace("/", "."))
        is_float = parts.options.onnx_type == FLOAT
        sink_logits["sink_logits"] = (
            logits if is_float else parts.graph.node(f"{path}/Cast", "Cast", [logits], {"to": FLOAT})
        )
    (attended,) = parts.graph.operator(
        f"layers.{index}/attention/SwaAttention",
        emitters.swa_attention,
        {
            "query": query,
            "key_cache": caches[contract.key_cache(index)][0],
            "value_cache": caches[contract.value_cache(index)][0],
            "query_start": step.query_start,
            "past_len": past,
            **step.paging(parts.config.layers[index].window),
            **sink_logits,
        },
        window=parts.config.layers[index].window,
        sink=parts.options.sink,
        scale=parts.config.attention_scale,
        softcap=parts.config.attention_softcap,
    )
    return attended


def _capture(parts: Parts, step: Step, index: int, query: Tensor) -> Caches:
    name = contract.capture(index)
    shape: list[int | str] = ["B", "snapkv_window", parts.config.num_heads, parts.config.head_size]
    inputs = {
        "query": query,
        "capture": parts.graph.input(name, parts.options.onnx_type, shape),
        "query_start": step.query_start,
        "past_len": step.past_len,
    }
    path = f"layers.{index}/attention/SnapKvCapture"
    (captured,) = parts.graph.operator(path, emitters.snap_kv_capture, inputs)
    return {name: (captured, shape)}
