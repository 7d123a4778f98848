"""The pieces of an eviction graph that its policies share: pooled scores, ranks and keep-lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from ortolan import contract
from ortolan.graphs.builder import INT32, INT64, GraphBuilder, Tensor, emitters
from ortolan.graphs.score_parts import ScoreParts
from ortolan.manifest import Manifest
from ortolan.policies.parts import EMPTY, FORCED, Kept, Scoring

POOLS = {"avg": "AveragePool", "max": "MaxPool"}


class EvictParts(ScoreParts):
    """An eviction graph under construction: its inputs, and what is computed from them.

    It is the `ortolan.policies.parts.Parts` that policies build with.
    """

    def __init__(self, manifest: Manifest, doc_string: str) -> None:
        graph = GraphBuilder("evict", doc_string)
        self.budget = graph.input(contract.EVICT_BUDGET, INT64, [1])
        self.window = graph.input(contract.EVICT_WINDOW, INT64, [1])
        self.sink = graph.input(contract.EVICT_SINK, INT64, [1])
        self._rope_variant: Tensor | None = None
        super().__init__(manifest, graph)

    def pooled(self, path: str, score: Tensor, scoring: Scoring) -> Tensor:
        """Pool scores [B, heads, C] along positions."""
        half = scoring.kernel // 2
        attributes: dict[str, Any] = {"kernel_shape": [scoring.kernel], "strides": [1], "pads": [half, half]}
        if scoring.pool == "avg":
            attributes["count_include_pad"] = 1
        op = POOLS[scoring.pool]
        return self.graph.node(f"{path}/{op}", op, [score], attributes)

    def pooled_score(self, i: int, scoring: Scoring) -> Tensor:
        """Score one layer's positions by the captured queries, and pool along positions: [B, Hkv, C]."""
        return self.pooled(f"layers.{i}/evict", self.score(i, scoring.group_reduce), scoring)

    def rope_variant(self) -> Tensor:
        """Declare the input that says which variant of its ropes the model uses, int64 [1]."""
        if self._rope_variant is None:
            self._rope_variant = self.graph.input(contract.ROPE_VARIANT, INT64, [1])
        return self._rope_variant

    def shared(self, scores: Mapping[int, Tensor], granularity: str) -> dict[int, Tensor]:
        """Sum the scores [B, Hkv, C] of those that share a list: [B, 1, C]; "kv_head" leaves them as they are."""
        if granularity == "kv_head":
            return dict(scores)
        axis = self.graph.constant("axes/heads", [1], np.int64)
        sums = {
            i: self.graph.node(f"layers.{i}/evict/ReduceSum", "ReduceSum", [score, axis], {"keepdims": 1})
            for i, score in scores.items()
        }
        if granularity == "model":
            return dict.fromkeys(sums, self.graph.node("model/Sum", "Sum", list(sums.values())))
        return sums

    def slots(self, path: str, score: Tensor) -> Tensor:
        """Return C of a score [B, heads, C], as int64 [1]."""
        shape = self.graph.node(f"{path}/Shape", "Shape", [score])
        return self.graph.node(f"{path}/slots", "Gather", [shape, self.graph.constant("index/slots", [2], np.int64)])

    def cache_slots(self, i: int) -> Tensor:
        """Return C of a layer's cache, as int64 [1]: the slots of a sequence, not of a pool."""
        path, graph = f"layers.{i}/evict", self.graph
        source, axis = (self._tables[i], 1) if i in self._tables else (self.layers[i].key, 2)
        shape = graph.node(f"{path}/Shape", "Shape", [source])
        index = graph.constant("index/pages" if i in self._tables else "index/slots", [axis], np.int64)
        if i not in self._tables:
            return graph.node(f"{path}/slots", "Gather", [shape, index])
        pages = graph.node(f"{path}/pages", "Gather", [shape, index])
        size = graph.constant("int64/page_size", [self.manifest.page_size], np.int64)
        return graph.node(f"{path}/slots", "Mul", [pages, size])

    def cached_rows(self, i: int, path: str, pool: Tensor) -> Tensor:
        """Bring a layer's key or value cache into the order of slots, [B, Hkv, C, D]."""
        if i not in self._tables:
            return pool
        graph = self.graph
        pages = graph.node(f"{path}/pages", "Gather", [pool, self._tables[i]], {"axis": 0})  # [B, M, Hkv, P, D]
        by_head = graph.node(f"{path}/by_head", "Transpose", [pages], {"perm": [0, 2, 1, 3, 4]})
        shape = [0, 0, -1, self.manifest.layers[i].head_size]
        name = "shapes/" + "x".join(map(str, shape))
        return graph.node(path, "Reshape", [by_head, graph.constant(name, shape, np.int64)])

    def scalar(self, path: str, vector: Tensor) -> Tensor:
        """Reshape [1] to []."""
        return self.graph.node(path, "Reshape", [vector, self.graph.constant("shapes/scalar", [], np.int64)])

    def positions(self, path: str, slots: Tensor) -> Tensor:
        """Return 0 .. C, int64 [C]."""
        start, one = self.graph.constant("range/start", 0, np.int64), self.graph.constant("range/step", 1, np.int64)
        return self.graph.node(f"{path}/positions", "Range", [start, self.scalar(f"{path}/slots/Reshape", slots), one])

    def lengths(self, path: str, kv_len: Tensor) -> Tensor:
        """Lengths as int64 [B, Hkv, 1]."""
        graph = self.graph
        wide = graph.node(f"{path}/kv_len/Cast", "Cast", [kv_len], {"to": INT64})
        return graph.node(f"{path}/kv_len/Unsqueeze", "Unsqueeze", [wide, graph.constant("axes/last", [2], np.int64)])

    def rank(self, path: str, score: Tensor, lengths: Tensor, positions: Tensor) -> Tensor:
        """Lift sinks and the last window above every score, and put empty slots below."""
        graph = self.graph
        is_sink = graph.node(f"{path}/is_sink", "Less", [positions, self.sink])
        window_start = graph.node(f"{path}/window_start", "Sub", [lengths, self.window])
        in_window = graph.node(f"{path}/in_window", "GreaterOrEqual", [positions, window_start])
        forced = graph.node(f"{path}/forced", "Or", [is_sink, in_window])
        top = graph.constant("float/forced", FORCED, np.float32)
        lifted = graph.node(f"{path}/lifted", "Where", [forced, top, score])
        is_held = graph.node(f"{path}/is_held", "Less", [positions, lengths])
        empty = graph.constant("float/empty", EMPTY, np.float32)
        return graph.node(f"{path}/ranked", "Where", [is_held, lifted, empty])

    def best(self, path: str, ranked: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the `count` best: which of them are held, and their indices; ties keep the lower index."""
        attributes = {"axis": -1, "largest": 1, "sorted": 1}
        values, chosen = self.graph.nodes(f"{path}/TopK", "TopK", [ranked, count], 2, attributes)
        zero = self.graph.constant("float/zero", 0, np.float32)
        return self.graph.node(f"{path}/held", "GreaterOrEqual", [values, zero]), chosen

    def ascending(self, path: str, held: Tensor, chosen: Tensor, slots: Tensor, count: Tensor) -> Tensor:
        """Sort chosen positions [B, heads, count]; those not held become -1 at the tail; int32."""
        graph = self.graph
        padded = graph.node(f"{path}/padded", "Where", [held, chosen, slots])
        attributes = {"axis": -1, "largest": 0, "sorted": 1}
        ordered, _ = graph.nodes(f"{path}/sort/TopK", "TopK", [padded, count], 2, attributes)
        tail = graph.node(f"{path}/tail", "Equal", [ordered, slots])
        minus_one = graph.constant("int64/minus_one", -1, np.int64)
        keep = graph.node(f"{path}/keep", "Where", [tail, minus_one, ordered])
        return graph.node(f"{path}/keep/Cast", "Cast", [keep], {"to": INT32})

    def keep_best(self, i: int, score: Tensor, budget: Tensor, window: Tensor | None = None) -> Kept:
        """Keep the best of each list of scores [B, Hkv or 1, C], up to `budget` [1].

        Sinks are kept first, and the last window [1], which is the graph's unless it is given.
        """
        window = self.window if window is None else window
        return self._select(f"layers.{i}/evict", {"score": score, "kv_len": self.layers[i].kv_len}, budget, window)

    def keep_best_together(self, members: Sequence[int], scoring: Scoring) -> dict[int, Kept]:
        """Pool and choose for several layers at once, each kv head by its own scores: the same in fewer kernels.

        The layers' caches must have equally many slots.
        """
        if len(members) == 1:
            return {i: self.keep_best(i, self.pooled_score(i, scoring), self.budget) for i in members}
        graph, path = self.graph, f"layers.{members[0]}-{members[-1]}/evict"
        along_heads = {"axis": 1}
        scores = [self.score(i, scoring.group_reduce) for i in members]
        score = graph.node(f"{path}/Concat", "Concat", scores, along_heads)
        kv_len = graph.node(f"{path}/kv_len/Concat", "Concat", [self.layers[i].kv_len for i in members], along_heads)
        inputs = {"score": self.pooled(path, score, scoring), "kv_len": kv_len}
        kept = self._select(path, inputs, self.budget, self.window)
        heads = [self.manifest.layers[i].num_kv_heads for i in members]
        sizes = graph.constant("sizes/" + "x".join(map(str, heads)), heads, np.int64)
        parts = [
            graph.nodes(f"{path}/{name}/Split", "Split", [joint, sizes], len(members), along_heads)
            for name, joint in (("keep", kept.keep), ("kept_len", kept.lengths))
        ]
        return {i: Kept(keep=keep, lengths=lengths) for i, keep, lengths in zip(members, *parts, strict=True)}

    def _select(self, path: str, inputs: dict[str, Tensor], budget: Tensor, window: Tensor) -> Kept:
        inputs = {**inputs, "budget": budget, "window": window, "sink": self.sink}
        keep, lengths = self.graph.operator(f"{path}/KvSelect", emitters.kv_select, inputs, num_outputs=2)
        return Kept(keep=keep, lengths=lengths)

    def counted(self, i: int, keep: Tensor) -> Kept:
        """Count what a list for each kv head keeps."""
        path, graph = f"layers.{i}/evict", self.graph
        is_kept = graph.node(f"{path}/is_kept", "GreaterOrEqual", [keep, graph.constant("int32/zero", 0, np.int32)])
        ones = graph.node(f"{path}/is_kept/Cast", "Cast", [is_kept], {"to": INT32})
        axis = graph.constant("axes/last", [2], np.int64)
        lengths = graph.node(f"{path}/kept/ReduceSum", "ReduceSum", [ones, axis], {"keepdims": 0})
        return Kept(keep=keep, lengths=lengths)

    def cast(self, path: str, tensor: Tensor, dtype: npt.DTypeLike) -> Tensor:
        """Convert a tensor to an element type."""
        target = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self.graph.node(path, "Cast", [tensor], {"to": target})

    def filled(self, path: str, shape: Tensor, value: float) -> Tensor:
        """Return a float32 tensor of a shape, int64 [rank], that holds one value."""
        filling = onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [1], [value])
        return self.graph.node(path, "ConstantOfShape", [shape], {"value": filling})
