"""Ortolan's operators around the cache of one attention layer, and the inputs that all layers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from ortolan import contract
from ortolan.graphs.builder import FLOAT, INT32, INT64, GraphBuilder, Tensor, emitters
from ortolan.graphs.config import AttentionConfig, MixerConfig
from ortolan.graphs.options import GraphOptions

_PROMISES = {
    contract.MAX_QUERY_LEN: "No sequence has more tokens in the step.",
    contract.MAX_KV_LEN: "After the step, no sequence that has tokens in it is longer in a full-attention cache, for "
    "any kv head.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The inputs that describe one step's packed sequences."""

    query_start: Tensor  # [B+1] int32
    past_len: Tensor  # [B] int32
    logit_rows: Tensor  # [R] int64
    block_tables: Mapping[int, Tensor]  # by window, [B, M] int32; empty where caches are contiguous
    state_slots: Mapping[str, Tensor]  # by kind of state, [B] int32; empty where caches are contiguous


def declare_step(
    graph: GraphBuilder, options: GraphOptions, windows: Iterable[int], states: Iterable[str] = ()
) -> Step:
    """Declare the inputs of a step; a paged graph has a block table for each kind of caches, and of other states."""
    query_start = graph.input(contract.QUERY_START, INT32, ["B + 1"])
    past_len = graph.input(contract.PAST_LEN, INT32, ["B"])
    logit_rows = graph.input(contract.LOGIT_ROWS, INT64, ["R"])
    tables = {}
    for window in dict.fromkeys(windows) if options.page_size else ():
        kind = contract.cache_kind(window)
        tables[window] = graph.input(contract.block_table(kind), INT32, ["B", f"pages_per_sequence.{kind}"])
    slots = {}
    for kind in dict.fromkeys(states) if options.page_size else ():
        table = graph.input(contract.block_table(kind), INT32, ["B", 1])
        slots[kind] = graph.reshape(f"{contract.block_table(kind)}/Reshape", table, (-1,))
    return Step(
        query_start=query_start, past_len=past_len, logit_rows=logit_rows, block_tables=tables, state_slots=slots
    )


def declare_promise(graph: GraphBuilder, name: str) -> Tensor:
    """Declare a bound of the step that attention may be told, [1] int32; 0 where it is not fed."""
    doc_string = (
        f"Need not be fed; in CPU memory. {_PROMISES[name]} 0, the default, promises nothing. A true bound changes no "
        "result; it may make CUDA faster."
    )
    return graph.default_input(name, [0], np.int32, doc_string)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointHeads:
    """The joint projection of a layer's heads, and what is done to them before they are attended.

    Attributes:
        qkv: [T, features].
        ports: weights of head norms, cosine and sine, by port; None where there is none.
        epsilon: of the norms.
    """

    qkv: Tensor
    ports: Mapping[str, Tensor | None]
    epsilon: float


class CachedAttention:
    """The cache of one layer, and the operators that write, read and capture.

    Attributes:
        config: of the attention.
        path: of its nodes.
        evictable: whether it captures queries and takes a physical length.
        past: tokens in the cache before the step, [B] or [B, Hkv] int32.
        updated: the caches after the step, keys and values.
    """

    def __init__(
        self, graph: GraphBuilder, options: GraphOptions, step: Step, index: int, config: AttentionConfig
    ) -> None:
        self.graph, self.options, self.step, self.index, self.config = graph, options, step, index, config
        self.path = f"layers.{index}/attention"
        self.evictable = is_evictable(config, options)
        self.past = step.past_len
        if self.evictable:
            self.past = graph.input(contract.kv_len(index), INT32, ["B", config.num_kv_heads])
        self._names = contract.key_cache(index), contract.value_cache(index)
        self._old = [graph.input(name, options.cache_onnx_type, self._shape) for name in self._names]
        self._scale_names = (contract.key_scale(index), contract.value_scale(index)) if options.has_code_caches else ()
        self._scales = [graph.input(name, FLOAT, self._shape[:3]) for name in self._scale_names]
        self._capture = None
        if self.evictable:
            self._capture = graph.input(contract.capture(index), options.onnx_type, self._capture_shape)
        self._captured: Tensor | None = None
        self._query_start = step.query_start
        self.updated: tuple[Tensor, Tensor]

    @property
    def _shape(self) -> list[int | str]:
        """[N, Hkv, P, D]."""
        heads, size = self.config.num_kv_heads, self.config.head_size
        if not self.options.page_size:
            return [f"pages_{self.index}", heads, f"slots_{self.index}", size]
        return [f"pages.{contract.cache_kind(self.config.window)}", heads, self.options.page_size, size]

    @property
    def _capture_shape(self) -> list[int | str]:
        return ["B", "snapkv_window", self.config.num_heads, self.config.head_size]

    @property
    def ports(self) -> dict[str, Tensor]:
        """What every operator on the cache takes: the step, and the way to the pages."""
        tables = self.step.block_tables
        paging = {"block_table": tables[self.config.window]} if tables else {}
        return {"query_start": self._query_start, "past_len": self.past, **paging}

    @property
    def _scale_ports(self) -> dict[str, Tensor]:
        return dict(zip(("key_scale", "value_scale"), self._scales, strict=False))

    @property
    def updated_ports(self) -> dict[str, Tensor]:
        """What attention reads after the append: the *updated* caches, or nothing would order it after the append."""
        return {"key_cache": self.updated[0], "value_cache": self.updated[1], **self._scale_ports, **self.ports}

    def append(self, key: Tensor, value: Tensor) -> None:
        """Write keys and values [T, Hkv, D] into the cache."""
        inputs = {"key": key, "value": value, "key_cache": self._old[0], "value_cache": self._old[1], **self.ports}
        name, sink = f"{self.path}/RingKvAppend", self.options.sink
        inputs |= self._scale_ports
        key, value, *self._scales = self.graph.operator(
            name, emitters.ring_kv_append, inputs, 4 if self._scales else 2, sink=sink
        )
        self.updated = key, value

    def append_qkv(self, heads: JointHeads) -> Tensor:
        """Normalise, rotate and write joint projections in one operator.

        Returns:
            Queries [T, Hq, D].
        """
        return self._add_joint("QkvRopeAppend", emitters.qkv_rope_append, heads, 3, captures=False)

    def attend_qkv(self, heads: JointHeads, sink_logits: Tensor | None) -> Tensor:
        """Do the same, capture queries where this layer can be evicted, and attend over the updated caches.

        Returns:
            What attention returns, [T, Hq, D].
        """
        sees_all = self.config.window < 0  # a ring's plan knows its window
        bounds = (contract.MAX_QUERY_LEN, contract.MAX_KV_LEN) if sees_all else (contract.MAX_QUERY_LEN,)
        promises = {name: declare_promise(self.graph, name) for name in bounds}
        heads = replace(heads, ports={**heads.ports, "sink_logits": sink_logits, **promises})
        return self._add_joint("QkvAttention", emitters.qkv_attention, heads, 4, captures=True, **_mask(self.config))

    def _add_joint(
        self,
        operator: str,
        emit: Callable[..., onnx.NodeProto],
        heads: JointHeads,
        num_outputs: int,
        *,
        captures: bool,
        **attributes: int | float,
    ) -> Tensor:
        """Add an operator that takes joint projections; the caches are its second and third output.

        Args:
            operator: its name.
            emit: its emitter.
            heads: what it takes.
            num_outputs: how many of its outputs stand before those of the capture and the scales.
            captures: whether it captures queries where this layer can be evicted.
            attributes: that only one of these operators has.

        Returns:
            Its first output.
        """
        captures = captures and self.evictable
        inputs = {"qkv": heads.qkv, "key_cache": self._old[0], "value_cache": self._old[1], **self.ports, **heads.ports}
        inputs |= self._scale_ports
        if captures:
            assert self._capture is not None, "an evictable layer has a capture"
            inputs |= {"capture": self._capture, "capture_past_len": self.step.past_len}
        outputs = self.graph.operator(
            f"{self.path}/{operator}",
            emit,
            inputs,
            num_outputs + captures + len(self._scales),
            skipped_outputs=(num_outputs,) if self._scales and not captures else (),
            num_heads=self.config.num_heads,
            epsilon=heads.epsilon,
            value_norm=int(self.config.value_norm),
            value_is_key=int(self.config.value_is_key),
            sink=self.options.sink,
            **attributes,
        )
        self.updated = outputs[1], outputs[2]
        self._captured = outputs[num_outputs] if captures else None
        self._scales = outputs[num_outputs + captures :]
        return outputs[0]

    def capture(self, query: Tensor) -> None:
        """Keep the last queries, where this layer can be evicted and they are not kept yet."""
        if self._capture is None or self._captured is not None:
            return
        inputs = {"query": query, "capture": self._capture, "query_start": self.step.query_start}
        inputs["past_len"] = self.step.past_len
        (self._captured,) = self.graph.operator(f"{self.path}/SnapKvCapture", emitters.snap_kv_capture, inputs)

    def begin_later(self, query_start: Tensor, past: Tensor) -> None:
        """Let what reads the cache from now on ask for the last rows of each sequence alone.

        Args:
            query_start: of those rows, [B+1] int32.
            past: tokens in the cache before them, [B] or [B, Hkv] int32.
        """
        self._query_start, self.past = query_start, past

    def declare_outputs(self) -> None:
        """Declare what the step updated as outputs of the graph."""
        for name, tensor in zip(self._names, self.updated, strict=True):
            self.graph.output(tensor, contract.output(name), self.options.cache_onnx_type, self._shape)
        for name, tensor in zip(self._scale_names, self._scales, strict=True):
            self.graph.output(tensor, contract.output(name), FLOAT, self._shape[:3])
        if self._captured is not None:
            name = contract.output(contract.capture(self.index))
            self.graph.output(self._captured, name, self.options.onnx_type, self._capture_shape)


def is_evictable(config: MixerConfig, options: GraphOptions) -> bool:
    """Tell whether a layer captures queries and takes a physical length."""
    if not isinstance(config, AttentionConfig):
        return False
    return config.window < 0 and options.snapkv_window > 0 and config.shares_cache_with is None


def attend(
    cache: CachedAttention, path: str, config: AttentionConfig, query: Tensor, sink_logits: Tensor | None
) -> Tensor:
    """Attend over a layer's updated caches.

    Args:
        cache: of this layer, or of the one that it shares with.
        path: of the node.
        config: of the layer that reads.
        query: [T, Hq, D].
        sink_logits: [Hq] float32, a learned logit per head; None where there is none.

    Returns:
        [T, Hq, D].
    """
    promise = declare_promise(cache.graph, contract.MAX_QUERY_LEN) if cache.options.fused else None
    (attended,) = cache.graph.operator(
        f"{path}/SwaAttention",
        emitters.swa_attention,
        {"query": query, **cache.updated_ports, "sink_logits": sink_logits, contract.MAX_QUERY_LEN: promise},
        sink=cache.options.sink,
        **_mask(config),
    )
    return attended


def _mask(config: AttentionConfig) -> dict[str, Any]:
    """Return the attributes by which attention of one layer differs from that of another."""
    return {"window": config.window, "scale": config.scale, "softcap": config.softcap}
