"""The last layers of a decoder where all of them read other layers' caches: they compute only the rows that are wanted.

What such a layer makes of a row is read by the same row of the layers behind it alone. So behind the last layer that
writes a cache, the rows that `logit_rows` does not name are dropped, and with them most of the work of a prompt. The
wanted rows must be the last ones of their sequences, in order: then they are sequences of their own, which begin later.

Source: transformers' modeling_gemma4.py, `_maybe_slice_kv_shared_inputs`, for the last row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ortolan.graphs.builder import FLOAT, INT32, INT64, Tensor, emitters, producer
from ortolan.graphs.cached_attention import CachedAttention
from ortolan.graphs.config import ModelConfig, Rope, RopeTable
from ortolan.graphs.parts import Parts, Rotation
from ortolan.graphs.rope import ANGLES, angles

PATH = "readers"
NARROW = "NarrowStep"


def first_reader(config: ModelConfig) -> int:
    """Return the first of the last layers that write no cache; the number of layers where the last one does."""
    writers = [index for index, layer in enumerate(config.layers) if layer.mixer.shares_cache_with is None]
    return max(writers, default=-1) + 1


def drop_rows(parts: Parts, tensors: list[Tensor]) -> list[Tensor]:
    """Let all that follows compute the rows of `logit_rows` alone.

    Args:
        parts: of the decoder; its rotations and the caches that later layers read are changed.
        tensors: what later layers read, [T, features] each.

    Returns:
        Their wanted rows, [R, features] each.
    """
    wanted, layers = parts.step.logit_rows, parts.config.layers[first_reader(parts.config) :]
    read, named = {layer.mixer.shares_cache_with for layer in layers}, {layer.mixer.rope for layer in layers}
    caches = [cache for owner, cache in parts.attentions.items() if owner in read]
    ropes = [rope for rope in parts.config.ropes if rope.name in named]
    if parts.options.fused:
        _narrow(parts, caches, ropes)
    else:
        starts = _wanted_starts(parts)
        dropped = _dropped_rows(parts, starts)
        for cache in caches:
            cache.begin_later(starts, _later(parts, cache, dropped))
        parts.rotations = {rope.name: _of_rows(parts, rope.name) for rope in ropes}
    parts.row_axis = "R"
    return [parts.rows(f"{PATH}/{index}", tensor, wanted) for index, tensor in enumerate(tensors)]


def _narrow(parts: Parts, caches: Sequence[CachedAttention], ropes: Sequence[Rope | RopeTable]) -> None:
    """Let caches begin later and rotate the wanted rows, by one operator for each tensor of lengths and each rope."""
    nodes = {rope.name: producer(parts.rotations[rope.name].cosine) for rope in ropes}
    positions = {name: node.inputs[0] for name, node in nodes.items() if node is not None and node.op == ANGLES}
    asked = next(iter(positions.values()), None)
    narrowed: dict[str, list[Tensor]] = {}
    for cache in caches:
        lengths = cache.past.name
        if lengths not in narrowed:
            inputs = {"query_start": parts.step.query_start, "past_len": cache.past}
            inputs |= {"row_indices": parts.step.logit_rows, "positions": None if narrowed else asked}
            narrowed[lengths] = parts.graph.operator(
                f"{PATH}/{lengths}/{NARROW}", emitters.narrow_step, inputs, 2 if inputs["positions"] is None else 3
            )
        starts, past, *_ = narrowed[lengths]
        cache.begin_later(starts, past)
    wanted = next(iter(narrowed.values()))[-1]
    parts.rotations = {
        rope.name: angles(parts, rope, wanted, f"{PATH}/{rope.name}")
        if isinstance(rope, Rope) and rope.name in positions
        else _of_rows(parts, rope.name)
        for rope in ropes
    }


def _of_rows(parts: Parts, name: str) -> Rotation:
    """Pick the wanted rows of cosine and sine."""
    rotation, wanted = parts.rotations[name], parts.step.logit_rows
    return replace(
        rotation,
        cosine=parts.graph.node(f"{PATH}/{name}/cosine/Gather", "Gather", [rotation.cosine, wanted], {"axis": 1}),
        sine=parts.graph.node(f"{PATH}/{name}/sine/Gather", "Gather", [rotation.sine, wanted], {"axis": 1}),
    )


def _wanted_starts(parts: Parts) -> Tensor:
    """Return which of the wanted rows each sequence owns: b those from [b] to [b + 1], [B+1] int32.

    That is the number of wanted rows before the sequence's first row, and at most the number of all rows before it:
    a step on CUDA may end in rows that belong to nobody, for which `logit_rows` repeats row 0.
    """
    graph, starts = parts.graph, parts.step.query_start
    axis = graph.constant("axes/last", [1], np.int64)
    column = graph.node(f"{PATH}/Unsqueeze", "Unsqueeze", [starts, axis])
    column = graph.node(f"{PATH}/column/Cast", "Cast", [column], {"to": INT64})
    before = graph.node(f"{PATH}/Less", "Less", [parts.step.logit_rows, column])  # [B+1, R]
    before = graph.node(f"{PATH}/before/Cast", "Cast", [before], {"to": FLOAT})
    counts = graph.node(f"{PATH}/ReduceSum", "ReduceSum", [before, axis], {"keepdims": 0})
    counts = graph.node(f"{PATH}/counts/Cast", "Cast", [counts], {"to": INT32})
    return graph.node(f"{PATH}/Min", "Min", [counts, starts])


def _dropped_rows(parts: Parts, starts: Tensor) -> Tensor:
    """Return how many rows of each sequence are not wanted, [B] int32."""
    graph = parts.graph
    first, last, end = (graph.constant(f"{PATH}/edges/{edge}", [edge], np.int64) for edge in (1, -1, 2**31))
    zero = graph.constant("axes/first", [0], np.int64)
    dropped = graph.node(f"{PATH}/dropped/Sub", "Sub", [parts.step.query_start, starts])  # before each sequence
    after = graph.node(f"{PATH}/after/Slice", "Slice", [dropped, first, end, zero])
    before = graph.node(f"{PATH}/before/Slice", "Slice", [dropped, zero, last, zero])
    return graph.node(f"{PATH}/Sub", "Sub", [after, before])


def _later(parts: Parts, cache: CachedAttention, dropped: Tensor) -> Tensor:
    """Return the tokens in a cache before the wanted rows, as many as it counts."""
    path = f"{PATH}/past_of_{cache.index}"
    if cache.evictable:
        dropped = parts.graph.node(
            f"{path}/Unsqueeze", "Unsqueeze", [dropped, parts.graph.constant("axes/last", [1], np.int64)]
        )
    return parts.graph.node(f"{path}/Add", "Add", [cache.past, dropped])
