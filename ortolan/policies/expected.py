"""ExpectedAttention: what the queries to come are expected to attend to.

Source: Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution,
arXiv 2510.00636; NVIDIA's kvpress, presses/expected_attention_press.py.

Queries before RoPE are taken for draws of one normal distribution. With mean m and covariance S after the rotation of
the next `FUTURE` positions, averaged, the expected weight of key k is exp(s m.k + s^2 k.S.k / 2), s the softmax scale.
The softmax of that exponent over keys, reduced over the query heads of a kv head, times the length of the value, is
the score. Three things are approximate: mean and covariance are those of the captured queries alone, not of the whole
prompt; the rotation is averaged before the exponential; and a model's softcap is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from ortolan.policies.base import reduced_groups, shared_lists, whole
from ortolan.policies.eviction import FLOAT32_BYTES, CacheShape, Eviction
from ortolan.policies.parts import Kept, Parts, Tensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

QUERIES = 256  # captured for the statistics, unless told otherwise
QUERIES_HELP = f"last queries that the policy learns from; by default {QUERIES}, or window where that is more"
FUTURE = 512  # positions over which the rotation of coming queries is averaged
REDUCTIONS = {"mean": "ReduceMean", "max": "ReduceMax", "sum": "ReduceSum"}
UNSEEN = -1e30

Derive: TypeAlias = "Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAttention(Eviction):
    """Keeps what the queries to come are expected to attend to.

    Attributes:
        queries: last queries whose mean and covariance are taken; None takes 256, or `window` where that is more.
    """

    summary = "the positions that queries to come are expected to attend to"
    needs_rope = True

    policy: str = "expected"
    queries: int | None = field(default=None, metadata=whole(QUERIES_HELP, optional=True))
    granularity: str = field(default="kv_head", metadata=shared_lists())
    group_reduce: str = field(default="mean", metadata=reduced_groups())

    @property
    def captured_queries(self) -> int:
        """Rows of the capture buffers that the policy needs."""
        return self.queries or max(self.window, QUERIES)

    def workspace_bytes(self, cache: CacheShape) -> int:
        """Return about how many bytes the eviction of a layer takes besides its cache.

        Every key is weighed by the covariance of every query head, in float32: two arrays [Hq, C, D].
        """
        products = 2 * cache.num_heads * cache.slots * cache.head_size
        return Eviction.workspace_bytes(self, cache) + FLOAT32_BYTES * products

    def keep(self, parts: Parts) -> dict[int, Kept]:
        """Keep sinks, the last window, and the best of the rest, per kv head, layer or model."""
        scores = {i: _Layer(parts, i, self.group_reduce).score() for i in parts.layers}
        shared = parts.shared(scores, self.granularity)
        return {i: parts.keep_best(i, score, parts.budget) for i, score in shared.items()}


@dataclass(frozen=True, slots=True)
class _Rotation:
    """Cosine and sine of each rotated pair, [..., R]."""

    cosine: Tensor
    sine: Tensor


class _Layer:
    """Scores the positions of one layer; G query heads share a kv head, and Wq queries of each are captured."""

    def __init__(self, parts: Parts, i: int, group_reduce: str) -> None:
        self._parts, self._graph, self._inputs, self._i = parts, parts.graph, parts.layers[i], i
        self._path, self._info = f"layers.{i}/evict", parts.manifest.layers[i]
        self._reduce = REDUCTIONS[group_reduce]
        ropes = parts.manifest.ropes or {}
        self._frequencies = ropes[self._info.rope] if self._info.rope else None  # [variants, R]
        self._lengths = parts.lengths(f"{self._path}/expected", self._inputs.kv_len)  # [B, Hkv, 1]

    def score(self) -> Tensor:
        """Score all slots, [B, Hkv, C] float32; empty ones hold anything."""
        mean, covariance = self._statistics()
        keys = self._rows("keys", self._inputs.key, self._inputs.key_scale)
        weights = self._node("Softmax", "Softmax", self._exponents(keys, mean, covariance), axis=-1)
        weights = self._node(self._reduce, self._reduce, weights, self._axes(2), keepdims=0)  # [B, Hkv, C]
        values = self._rows("values", self._inputs.value, self._inputs.value_scale)
        norms = self._node("values/ReduceL2", "ReduceL2", values, self._axes(3), keepdims=0)
        return self._node("score", "Mul", weights, norms)

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Return the mean [B, Hkv, G, 1, D] and covariance [B, Hkv, G, D, D] of queries to come."""
        ages, held = self._ages()
        queries = self._rotated("next", self._queries(), self._until_next(ages))
        count = self._cast("count/Cast", held)
        count = self._node("count", "ReduceSum", count, self._axes(3), keepdims=1)
        count = self._node("count/Max", "Max", count, self._float("one", 1))
        zero = self._float("zero", 0)
        queries = self._node("queries/held", "Where", held, queries, zero)
        total = self._node("mean/ReduceSum", "ReduceSum", queries, self._axes(3), keepdims=1)
        mean = self._node("mean/Div", "Div", total, count)
        centered = self._node("centered/Sub", "Sub", queries, mean)
        centered = self._node("centered", "Where", held, centered, zero)
        future = self._future()
        mean, centered = self._rotated("mean", mean, future), self._rotated("centered", centered, future)
        flipped = self._node("centered/Transpose", "Transpose", centered, perm=[0, 1, 2, 4, 3])
        products = self._node("covariance/MatMul", "MatMul", flipped, centered)
        return mean, self._node("covariance", "Div", products, count)

    def _queries(self) -> Tensor:
        """Return the captured queries by kv head, [B, Hkv, G, Wq, D] float32."""
        heads, size = self._info.num_kv_heads, self._info.head_size
        shape = [0, 0, heads, self._info.num_heads // heads, size]
        captured = self._cast("queries/Cast", self._inputs.capture)
        name = "shapes/" + "x".join(map(str, shape))
        split = self._node("queries/Reshape", "Reshape", captured, self._graph.constant(name, shape, "int64"))
        return self._node("queries", "Transpose", split, perm=[0, 2, 3, 1, 4])

    def _ages(self) -> tuple[Tensor, Tensor]:
        """Return how many tokens came after each captured query, and whether it is one, [B, Hkv, 1, Wq, 1].

        The newest stands in row (kv_len - 1) mod Wq. Queries of sinks are left out, as they are unlike others.
        """
        shape = self._node("queries/Shape", "Shape", self._inputs.capture)
        rows = self._node("rows", "Gather", shape, self._graph.constant("index/one", [1], "int64"))
        row = self._parts.positions(f"{self._path}/expected/row", rows)
        newest = self._node("newest", "Sub", self._lengths, self._graph.constant("int64/one", [1], "int64"))
        ages = self._node("ages", "Mod", self._node("ages/Sub", "Sub", newest, row), rows)  # [B, Hkv, Wq]
        known = self._node("known", "Sub", self._lengths, self._parts.sink)
        held = self._node("held", "Less", ages, known)
        axes = self._axes(2, 4)
        ages = self._node("ages/Unsqueeze", "Unsqueeze", ages, axes)
        return ages, self._node("held/Unsqueeze", "Unsqueeze", held, axes)

    def _until_next(self, ages: Tensor) -> _Rotation | None:
        """Return the rotation that moves each captured query to the position behind the last."""
        frequencies = self._of_variant("inv_freq", lambda table: table)
        if frequencies is None:
            return None
        steps = self._cast("steps/Cast", ages)
        steps = self._node("steps", "Add", steps, self._float("one", 1))
        angles = self._node("angles", "Mul", steps, frequencies)  # [B, Hkv, 1, Wq, R]
        return _Rotation(self._node("cosine", "Cos", angles), self._node("sine", "Sin", angles))

    def _future(self) -> _Rotation | None:
        """Return the average rotation over the next positions, the first of which is not rotated; [1, R]."""
        import numpy as np  # here, so that the options alone need no NumPy

        steps = np.arange(FUTURE)[:, None, None]
        cosine = self._of_variant("mean_cosine", lambda table: np.cos(steps * table).mean(axis=0))
        sine = self._of_variant("mean_sine", lambda table: np.sin(steps * table).mean(axis=0))
        return None if cosine is None else _Rotation(cosine, sine)

    def _of_variant(self, name: str, derive: Derive) -> Tensor | None:
        """Derive a table [variants, R] from the layer's frequencies, and take the variant in use: [1, R]."""
        import numpy as np

        if self._frequencies is None:
            return None
        table = derive(np.array(self._frequencies))
        constant = self._graph.constant(f"rope.{self._info.rope}/{name}", table, "float32")
        if len(table) == 1:
            return constant
        return self._node(name, "Gather", constant, self._parts.rope_variant())

    def _rotated(self, name: str, x: Tensor, rotation: _Rotation | None) -> Tensor:
        """Rotate the pairs (r, R + r) of the first 2 R elements of the last axis."""
        if rotation is None or self._frequencies is None:
            return x
        half = len(self._frequencies[0])
        sizes = [half, half, self._info.head_size - 2 * half]
        sizes = sizes if sizes[2] else sizes[:2]
        sizes_name = "sizes/" + "x".join(map(str, sizes))
        split = self._graph.nodes(
            f"{self._path}/expected/{name}/Split",
            "Split",
            [x, self._graph.constant(sizes_name, sizes, "int64")],
            len(sizes),
            {"axis": -1},
        )

        def combine(part: str, op: str, a: Tensor, b: Tensor) -> Tensor:
            left = self._node(f"{name}/{part}/Mul", "Mul", a, rotation.cosine)
            right = self._node(f"{name}/{part}/Mul_1", "Mul", b, rotation.sine)
            return self._node(f"{name}/{part}", op, left, right)

        first, second = combine("first", "Sub", split[0], split[1]), combine("second", "Add", split[1], split[0])
        return self._node(f"{name}/Concat", "Concat", first, second, *split[2:], axis=-1)

    def _exponents(self, keys: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return s m.k + s^2 k.S.k / 2 of every key, [B, Hkv, G, C]; of sinks and empty slots, very little."""
        scale = self._info.scale or 1 / math.sqrt(self._info.head_size)
        column = self._node("keys/Unsqueeze", "Unsqueeze", keys, self._axes(2))  # [B, Hkv, 1, C, D]
        spread = self._node("spread/MatMul", "MatMul", column, covariance)  # [B, Hkv, G, C, D]
        spread = self._node("spread", "Mul", spread, self._float("half_scale", scale / 2))
        inner = self._node("inner", "Add", spread, mean)
        product = self._node("exponents/Mul", "Mul", inner, column)
        exponents = self._node("exponents/ReduceSum", "ReduceSum", product, self._axes(4), keepdims=0)
        exponents = self._node("exponents", "Mul", exponents, self._float("scale", scale))
        slots = self._parts.slots(f"{self._path}/expected", keys)
        positions = self._parts.positions(f"{self._path}/expected", slots)
        before = self._node("before_end", "Less", positions, self._lengths)
        after = self._node("after_sinks", "GreaterOrEqual", positions, self._parts.sink)
        allowed = self._node("allowed/And", "And", before, after)
        allowed = self._node("allowed", "Unsqueeze", allowed, self._axes(2))
        return self._node("seen", "Where", allowed, exponents, self._float("unseen", UNSEEN))

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        return self._parts.cast(f"{self._path}/expected/{name}", tensor, "float32")

    def _rows(self, name: str, cache: Tensor, scale: Tensor) -> Tensor:
        """Return keys or values in the order of slots, [B, Hkv, C, D] float32; codes are multiplied by their scales."""
        rows = cache if scale is None else self._decoded(name, cache, scale)
        rows = self._parts.cached_rows(self._i, f"{self._path}/expected/{name}/rows", rows)
        return self._cast(f"{name}/Cast", rows) if scale is None else rows

    def _decoded(self, name: str, codes: Tensor, scale: Tensor) -> Tensor:
        """Return what a pool of codes stands for, [N, Hkv, P, D] float32; no Gather takes fp8."""
        factors = self._node(f"{name}/scale/Unsqueeze", "Unsqueeze", scale, self._axes(3))
        return self._node(f"{name}/scaled", "Mul", self._cast(f"{name}/codes/Cast", codes), factors)

    def _node(self, name: str, op: str, *inputs: Tensor, **attributes: int | list[int]) -> Tensor:
        return self._graph.node(f"{self._path}/expected/{name}", op, inputs, attributes)

    def _axes(self, *axes: int) -> Tensor:
        return self._graph.constant("axes/" + "x".join(map(str, axes)), axes, "int64")

    def _float(self, name: str, value: float) -> Tensor:
        return self._graph.constant(f"float/{name}", value, "float32")
