"""Puts Ortolan's operators in the place of one attention node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ortolan import contract
from ortolan.custom_ops import emitters
from ortolan.graphs.foreign.gqa import QUERY, VALUE, Attention
from ortolan.graphs.fusions.rewriter import GraphRewriter, Tensor

MICROSOFT = "com.microsoft"
Caches: TypeAlias = list[tuple[str, Tensor]]  # output name, tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The inputs of the converted graph that all layers share.

    Attributes:
        query_start: [B+1] int32.
        past_len: [B] int32.
        positions: [1, T] int64, rows of the RoPE tables; None where nothing rotates.
        block_tables: by window, [B, M] int32; empty where caches are contiguous.
    """

    query_start: Tensor
    past_len: Tensor
    positions: Tensor | None
    block_tables: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer to be replaced.

    Attributes:
        index: of the layer.
        attention: what it computes.
        window: keys a query sees; -1 for all.
        sink: first positions that it keeps and sees beside its window.
        evictable: whether it captures queries and takes a physical length.
        page_size: slots of a page; 0 for contiguous caches.
        onnx_type: element type of the caches.
    """

    index: int
    attention: Attention
    window: int
    sink: int
    evictable: bool
    page_size: int
    onnx_type: int

    @property
    def path(self) -> str:
        """Where its nodes stand."""
        return f"layers.{self.index}/attention"

    @property
    def cache_shape(self) -> list[int | str]:
        """[N, Hkv, P, D]."""
        heads, size = self.attention.num_kv_heads, self.attention.head_size
        if not self.page_size:
            return [f"pages_{self.index}", heads, f"slots_{self.index}", size]
        return [f"pages.{contract.cache_kind(self.window)}", heads, self.page_size, size]


def replace_attention(rewriter: GraphRewriter, layer: Layer, step: StepInputs) -> Caches:
    """Replace one attention node; returns the caches that the graph must give, by output name."""
    attention, output = layer.attention, layer.attention.node.outputs[0]
    query, key, value = _heads(rewriter, layer, step)
    past = step.past_len
    if layer.evictable:
        past = declare_input(
            rewriter, contract.kv_len(layer.index), onnx.TensorProto.INT32, ["B", attention.num_kv_heads]
        )
    paging = {"block_table": step.block_tables[layer.window]} if step.block_tables else {}
    caches = _append(rewriter, layer, (key, value), {"query_start": step.query_start, "past_len": past, **paging})
    attended = rewriter.value(f"{layer.path}/SwaAttention/output")
    rewriter.operator(
        f"{layer.path}/SwaAttention",
        emitters.swa_attention,
        {
            "query": query,
            "key_cache": caches[0][1],
            "value_cache": caches[1][1],
            "query_start": step.query_start,
            "past_len": past,
            **paging,
            "sink_logits": _sink_logits(rewriter, layer),
        },
        [attended],
        window=layer.window,
        sink=layer.sink,
        scale=attention.scale,
        softcap=attention.softcap,
    )
    if layer.evictable:
        caches.append(_capture(rewriter, layer, step, query))
    _reshape(rewriter, f"{layer.path}/Reshape", attended, output, (1, -1, attention.num_heads * attention.head_size))
    return caches


def declare_input(rewriter: GraphRewriter, name: str, dtype: int, shape: list[int | str]) -> Tensor:
    """Add an input to the graph."""
    tensor = gs.Variable(name, dtype=dtype, shape=shape)
    rewriter.graph.inputs.append(tensor)
    return tensor


def _reshape(rewriter: GraphRewriter, name: str, tensor: Tensor, output: Tensor, shape: tuple[int, ...]) -> Tensor:
    constant = rewriter.constant("shapes/" + "x".join(str(dim) for dim in shape), shape)
    rewriter.node(name, "Reshape", [tensor, constant], [output])
    return output


def _heads(rewriter: GraphRewriter, layer: Layer, step: StepInputs) -> list[Tensor]:
    """Return queries [T, Hq, D], keys and values [T, Hkv, D], normalised and rotated."""
    attention = layer.attention
    counts = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
    tensors = _split(rewriter, layer, counts) if attention.is_packed else attention.node.inputs[QUERY : VALUE + 1]
    heads = []
    for part, name, count in zip(tensors, ("query", "key", "value"), counts, strict=True):
        tensor, path = part, f"{layer.path}/{name}"
        if name != "value":
            tensor = _normalise(rewriter, layer, tensor, name, count)
            tensor = _rotate(rewriter, layer, step, tensor, name, count)
        split = rewriter.value(f"{path}/Reshape/output")
        heads.append(_reshape(rewriter, f"{path}/Reshape", tensor, split, (-1, count, attention.head_size)))
    return heads


def _split(rewriter: GraphRewriter, layer: Layer, counts: tuple[int, ...]) -> list[Tensor]:
    parts = [rewriter.value(f"{layer.path}/Split/output_{index}") for index in range(3)]
    sizes = [count * layer.attention.head_size for count in counts]
    constant = rewriter.constant("sizes/" + "x".join(map(str, sizes)), sizes)
    rewriter.node(f"{layer.path}/Split", "Split", [layer.attention.node.inputs[QUERY], constant], parts, axis=-1)
    return parts


def _normalise(rewriter: GraphRewriter, layer: Layer, tensor: Tensor, name: str, count: int) -> Tensor:
    norm, size = layer.attention.norm, layer.attention.head_size
    if norm is None:
        return tensor
    path = f"{layer.path}/{name}_norm"
    split = _reshape(rewriter, f"{path}/Reshape", tensor, rewriter.value(f"{path}/heads"), (1, -1, size))
    normed = rewriter.value(f"{path}/output")
    weight = norm.query_weight if name == "query" else norm.key_weight
    attributes: dict[str, Any] = {"axis": -1, "epsilon": norm.epsilon, "stash_type": onnx.TensorProto.FLOAT}
    rewriter.node(path, "SimplifiedLayerNormalization", [split, weight], [normed], **attributes)
    return _reshape(rewriter, f"{path}/flatten", normed, rewriter.value(f"{path}/flat"), (1, -1, count * size))


def _rotate(rewriter: GraphRewriter, layer: Layer, step: StepInputs, tensor: Tensor, name: str, count: int) -> Tensor:
    rotation = layer.attention.rotation
    if rotation is None:
        return tensor
    path = f"{layer.path}/{name}/RotaryEmbedding"
    rotated = rewriter.value(f"{path}/output")
    attributes: dict[str, Any] = {"num_heads": count, "interleaved": rotation.interleaved}
    if rotation.rotary_size != layer.attention.head_size:
        attributes["rotary_embedding_dim"] = rotation.rotary_size
    inputs = [tensor, step.positions, rotation.cosine, rotation.sine]
    rewriter.node(path, "RotaryEmbedding", inputs, [rotated], domain=MICROSOFT, **attributes)
    return rotated


def _append(rewriter: GraphRewriter, layer: Layer, new: tuple[Tensor, Tensor], step: Mapping[str, Tensor]) -> Caches:
    names = contract.key_cache(layer.index), contract.value_cache(layer.index)
    old = [declare_input(rewriter, name, layer.onnx_type, layer.cache_shape) for name in names]
    updated = [gs.Variable(contract.output(name), dtype=layer.onnx_type, shape=layer.cache_shape) for name in names]
    inputs = {"key": new[0], "value": new[1], "key_cache": old[0], "value_cache": old[1], **step}
    rewriter.operator(f"{layer.path}/RingKvAppend", emitters.ring_kv_append, inputs, updated, sink=layer.sink)
    return list(zip(names, updated, strict=True))


def _sink_logits(rewriter: GraphRewriter, layer: Layer) -> Tensor | None:
    """Return float32 logits [Hq] that join the softmax's denominator."""
    attention = layer.attention
    if attention.sinks is None:
        return rewriter.constant("sinks/zero", [0.0] * attention.num_heads, np.float32) if attention.smooth else None
    cast = rewriter.value(f"{layer.path}/sink_logits")
    rewriter.node(f"{layer.path}/sink_logits/Cast", "Cast", [attention.sinks], [cast], to=onnx.TensorProto.FLOAT)
    return cast


def _capture(rewriter: GraphRewriter, layer: Layer, step: StepInputs, query: Tensor) -> tuple[str, Tensor]:
    name = contract.capture(layer.index)
    shape: list[int | str] = ["B", "snapkv_window", layer.attention.num_heads, layer.attention.head_size]
    captured = gs.Variable(contract.output(name), dtype=layer.onnx_type, shape=shape)
    inputs = {
        "query": query,
        "capture": declare_input(rewriter, name, layer.onnx_type, shape),
        "query_start": step.query_start,
        "past_len": step.past_len,
    }
    rewriter.operator(f"{layer.path}/SnapKvCapture", emitters.snap_kv_capture, inputs, [captured])
    return name, captured
