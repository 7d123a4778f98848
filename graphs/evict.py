"""Builds evict.onnx: SnapKV as a graph, from captured queries to compacted caches.

Source: SnapKV, arXiv 2404.14469; the order of steps is that of docs/snapkv.md.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx

from ortolan import contract
from ortolan.errors import ConfigError
from ortolan.graphs.builder import INT32, INT64, GraphBuilder, Shape, Tensor, emitters
from ortolan.graphs.options import ONNX_TYPES
from ortolan.manifest import Manifest

SNAPKV_METADATA = "ortolan.snapkv"
POOLS = {"avg": "AveragePool", "max": "MaxPool"}
GRANULARITIES = ("kv_head", "layer", "model")
GROUP_REDUCES = ("mean", "max", "sum")
DOC_STRING = (
    "SnapKV eviction: scores cached positions by the captured queries, keeps the best `budget` of each "
    "full-attention cache (sinks and the last `window` always), and moves them to the front."
)
_FORCED = 1e30  # above any sum of probabilities
_EMPTY = -1.0  # below any of them


def build_evict_model(
    manifest: Manifest,
    *,
    kernel: int = 5,
    pool: str = "avg",
    granularity: str = "kv_head",
    group_reduce: str = "mean",
) -> onnx.ModelProto:
    """Build the eviction graph of a model.

    Args:
        manifest: of a model with at least one evictable layer.
        kernel: odd width of the pooling along positions (stride 1, same length).
        pool: "avg" (padding counted, as PyTorch's avg_pool1d) or "max".
        granularity: who shares a keep-list: each "kv_head" has its own, all of a "layer", or the "model".
        group_reduce: over the query heads of a kv head: "mean", "max" or "sum".

    Raises:
        ConfigError: an option is not one of these, or no layer can be evicted.
    """
    _check(manifest, kernel, pool, granularity, group_reduce)
    builder = _EvictBuilder(manifest, kernel, pool, granularity, group_reduce)
    model = builder.build()
    options = {"kernel": kernel, "pool": pool, "granularity": granularity, "group_reduce": group_reduce}
    onnx.helper.set_model_props(model, {SNAPKV_METADATA: json.dumps(options)})
    return model


def _check(manifest: Manifest, kernel: int, pool: str, granularity: str, group_reduce: str) -> None:
    if not any(layer.evictable for layer in manifest.layers):
        raise ConfigError("this model has no full-attention layer that captures queries, so nothing can be evicted")
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"kernel is {kernel}; it must be an odd number of positions")
    for name, value, allowed in (
        ("pool", pool, POOLS),
        ("granularity", granularity, GRANULARITIES),
        ("group_reduce", group_reduce, GROUP_REDUCES),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")


class _EvictBuilder:
    def __init__(self, manifest: Manifest, kernel: int, pool: str, granularity: str, group_reduce: str) -> None:
        self.manifest, self.kernel, self.pool = manifest, kernel, pool
        self.granularity, self.group_reduce = granularity, group_reduce
        self.graph = GraphBuilder("evict", DOC_STRING)
        self.dtype = ONNX_TYPES[manifest.dtype]
        self.layers = [i for i, layer in enumerate(manifest.layers) if layer.evictable]

    def build(self) -> onnx.ModelProto:
        graph = self.graph
        self.budget = graph.input(contract.EVICT_BUDGET, INT64, [1])
        self.window = graph.input(contract.EVICT_WINDOW, INT64, [1])
        self.sink = graph.input(contract.EVICT_SINK, INT64, [1])
        inputs = {i: self._declare(i) for i in self.layers}
        scores = {i: self._score(i, *inputs[i]) for i in self.layers}
        if self.granularity == "model":
            total = graph.node("model/Sum", "Sum", list(scores.values()))
            scores = dict.fromkeys(self.layers, total)
        for i in self.layers:
            self._evict(i, scores[i], *inputs[i])
        return graph.finish()

    def _declare(self, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer, graph = self.manifest.layers[i], self.graph
        cache: Shape = [f"pages_{i}", layer.num_kv_heads, f"slots_{i}", layer.head_size]
        heads = self.manifest.num_heads
        return (
            graph.input(contract.capture(i), self.dtype, ["B", "snapkv_window", heads, layer.head_size]),
            graph.input(contract.key_cache(i), self.dtype, cache),
            graph.input(contract.value_cache(i), self.dtype, cache),
            graph.input(contract.kv_len(i), INT32, ["B", layer.num_kv_heads]),
        )

    def _score(self, i: int, capture: Tensor, key: Tensor, _value: Tensor, kv_len: Tensor) -> Tensor:
        """Score and pool: [B, Hkv, C], or [B, 1, C] where heads share a list."""
        path, graph = f"layers.{i}/evict", self.graph
        (score,) = graph.operator(
            f"{path}/SnapKvScore",
            emitters.snap_kv_score,
            {"capture": capture, "key_cache": key, "kv_len": kv_len},
            scale=self.manifest.attention_scale,
            softcap=self.manifest.attention_softcap,
            group_reduce=self.group_reduce,
        )
        half = self.kernel // 2
        attributes: dict[str, Any] = {"kernel_shape": [self.kernel], "strides": [1], "pads": [half, half]}
        if self.pool == "avg":
            attributes["count_include_pad"] = 1
        op = POOLS[self.pool]
        pooled = graph.node(f"{path}/{op}", op, [score], attributes)
        if self.granularity == "kv_head":
            return pooled
        axis = graph.constant("axes/heads", [1], np.int64)
        return graph.node(f"{path}/ReduceSum", "ReduceSum", [pooled, axis], {"keepdims": 1})

    def _evict(self, i: int, score: Tensor, _capture: Tensor, key: Tensor, value: Tensor, kv_len: Tensor) -> None:
        path, graph, layer = f"layers.{i}/evict", self.graph, self.manifest.layers[i]
        keep = self._select(path, score, kv_len)
        caches = graph.operator(
            f"{path}/KvCompact",
            emitters.kv_compact,
            {"key_cache": key, "value_cache": value, "keep": keep},
            num_outputs=2,
        )
        limit = graph.node(f"{path}/budget/Cast", "Cast", [self.budget], {"to": INT32})
        kept = graph.node(f"{path}/Min", "Min", [kv_len, limit])
        shape: Shape = [f"pages_{i}", layer.num_kv_heads, f"slots_{i}", layer.head_size]
        graph.output(caches[0], contract.output(contract.key_cache(i)), self.dtype, shape)
        graph.output(caches[1], contract.output(contract.value_cache(i)), self.dtype, shape)
        graph.output(kept, contract.output(contract.kv_len(i)), INT32, ["B", layer.num_kv_heads])
        heads = layer.num_kv_heads if self.granularity == "kv_head" else 1
        graph.output(keep, contract.keep(i), INT32, ["B", heads, f"kept_{i}"])

    def _select(self, path: str, score: Tensor, kv_len: Tensor) -> Tensor:
        """Choose positions: the keep-list [B, heads, min(budget, C)] int32, ascending, -1 at its tail."""
        graph = self.graph
        scalar = graph.constant("shapes/scalar", [], np.int64)
        shape = graph.node(f"{path}/Shape", "Shape", [score])
        slots = graph.node(f"{path}/slots", "Gather", [shape, graph.constant("index/slots", [2], np.int64)])
        end = graph.node(f"{path}/slots/Reshape", "Reshape", [slots, scalar])
        start, one = graph.constant("range/start", 0, np.int64), graph.constant("range/step", 1, np.int64)
        positions = graph.node(f"{path}/positions", "Range", [start, end, one])  # [C]
        ranked = self._rank(path, score, self._lengths(path, kv_len), positions)
        count = graph.node(f"{path}/count", "Min", [self.budget, slots])
        best, chosen = graph.nodes(f"{path}/TopK", "TopK", [ranked, count], 2, {"axis": -1, "largest": 1, "sorted": 1})
        zero = graph.constant("float/zero", 0, np.float32)
        held = graph.node(f"{path}/held", "GreaterOrEqual", [best, zero])
        padded = graph.node(f"{path}/padded", "Where", [held, chosen, end])
        ascending = {"axis": -1, "largest": 0, "sorted": 1}
        ordered, _ = graph.nodes(f"{path}/sort/TopK", "TopK", [padded, count], 2, ascending)
        tail = graph.node(f"{path}/tail", "Equal", [ordered, end])
        minus_one = graph.constant("int64/minus_one", -1, np.int64)
        keep = graph.node(f"{path}/keep", "Where", [tail, minus_one, ordered])
        return graph.node(f"{path}/keep/Cast", "Cast", [keep], {"to": INT32})

    def _lengths(self, path: str, kv_len: Tensor) -> Tensor:
        """Lengths as int64 [B, heads, 1]; heads that share a list hold equal lengths."""
        graph = self.graph
        wide = graph.node(f"{path}/kv_len/Cast", "Cast", [kv_len], {"to": INT64})
        column = graph.node(f"{path}/kv_len/Unsqueeze", "Unsqueeze", [wide, graph.constant("axes/last", [2], np.int64)])
        if self.granularity == "kv_head":
            return column
        axis = graph.constant("axes/heads", [1], np.int64)
        return graph.node(f"{path}/kv_len/ReduceMin", "ReduceMin", [column, axis], {"keepdims": 1})

    def _rank(self, path: str, score: Tensor, lengths: Tensor, positions: Tensor) -> Tensor:
        """Lift sinks and the last window above every score, and put empty slots below."""
        graph = self.graph
        is_sink = graph.node(f"{path}/is_sink", "Less", [positions, self.sink])
        window_start = graph.node(f"{path}/window_start", "Sub", [lengths, self.window])
        in_window = graph.node(f"{path}/in_window", "GreaterOrEqual", [positions, window_start])
        forced = graph.node(f"{path}/forced", "Or", [is_sink, in_window])
        top = graph.constant("float/forced", _FORCED, np.float32)
        lifted = graph.node(f"{path}/lifted", "Where", [forced, top, score])
        is_held = graph.node(f"{path}/is_held", "Less", [positions, lengths])
        return graph.node(
            f"{path}/ranked", "Where", [is_held, lifted, graph.constant("float/empty", _EMPTY, np.float32)]
        )
