"""What a policy builds its graph with: the inputs of an eviction graph, and the pieces that policies share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy.typing as npt

    from ortolan.manifest import Manifest

Tensor: TypeAlias = Any  # of the graph under construction; its library has no types

FORCED = 1e30  # above any sum of probabilities
EMPTY = -1.0  # below any of them


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """One evictable layer's buffers."""

    capture: Tensor  # [B, Wq, Hq, D]
    key: Tensor  # [N, Hkv, P, D]
    value: Tensor  # [N, Hkv, P, D]
    kv_len: Tensor  # [B, Hkv] int32
    key_scale: Tensor = None  # [N, Hkv, P] float32, where caches hold codes
    value_scale: Tensor = None  # the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a policy keeps of one layer."""

    keep: Tensor  # [B, Hkv or 1, K] int32, ascending, -1 at its tail
    lengths: Tensor  # [B, Hkv] int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How captured queries score positions.

    Attributes:
        kernel: odd width of the pooling along positions (stride 1, same length).
        pool: "avg" (padding counted, as PyTorch's avg_pool1d) or "max".
        group_reduce: over the query heads of a kv head: "mean", "max" or "sum".
    """

    kernel: int
    pool: str
    group_reduce: str


class Graph(Protocol):
    """A graph under construction; a node's name is a path."""

    def constant(self, name: str, values: npt.ArrayLike, dtype: npt.DTypeLike) -> Tensor:
        """Refer to a small constant; the second use gives the same tensor."""

    def node(self, name: str, op: str, inputs: Sequence[Tensor], attrs: Mapping[str, Any] | None = None) -> Tensor:
        """Add a node of the standard domain and return its first output."""

    def nodes(
        self,
        name: str,
        op: str,
        inputs: Sequence[Tensor],
        num_outputs: int,
        attrs: Mapping[str, Any] | None = None,
    ) -> list[Tensor]:
        """Add a node of the standard domain and return all its outputs."""


class PieceParts(Protocol):
    """A graph under construction that scores by captured queries; C slots are in a sequence's cache."""

    @property
    def manifest(self) -> Manifest:
        """The model's."""

    @property
    def graph(self) -> Graph:
        """The graph itself."""

    @property
    def layers(self) -> Mapping[int, LayerInputs]:
        """Buffers of each evictable layer."""

    def score(self, i: int, group_reduce: str, query_reduce: str = "mean") -> Tensor:
        """Score a layer's positions by the captured queries: [B, Hkv, C]."""


class Parts(PieceParts, Protocol):
    """An eviction graph under construction."""

    @property
    def budget(self) -> Tensor:
        """Input, int64 [1]."""

    @property
    def window(self) -> Tensor:
        """Input, int64 [1]."""

    @property
    def sink(self) -> Tensor:
        """Input, int64 [1]."""

    def rope_variant(self) -> Tensor:
        """Declare the input that says which variant of its ropes the model uses, int64 [1]."""

    def collected_score(self, i: int) -> Tensor:
        """Declare the input that has the largest scores of all pieces of a second reading: [B, Hkv, C] float32."""

    def pooled_score(self, i: int, scoring: Scoring) -> Tensor:
        """Score a layer's positions by the captured queries, and pool along positions: [B, Hkv, C]."""

    def shared(self, scores: Mapping[int, Tensor], granularity: str) -> dict[int, Tensor]:
        """Sum the scores [B, Hkv, C] of those that share a list: [B, 1, C]; "kv_head" leaves them as they are."""

    def keep_best(self, i: int, score: Tensor, budget: Tensor, window: Tensor | None = None) -> Kept:
        """Keep the best of each list of scores [B, Hkv or 1, C], up to `budget` [1], sinks and window first."""

    def keep_best_together(self, members: Sequence[int], scoring: Scoring) -> dict[int, Kept]:
        """Score, pool and choose for several layers at once, each kv head by its own scores."""

    def slots(self, path: str, score: Tensor) -> Tensor:
        """Return C of a score [B, heads, C], as int64 [1]."""

    def cache_slots(self, i: int) -> Tensor:
        """Return C of a layer's cache, as int64 [1]: the slots of a sequence, not of a pool."""

    def cached_rows(self, i: int, path: str, pool: Tensor) -> Tensor:
        """Bring a layer's key or value cache into the order of slots, [B, Hkv, C, D]."""

    def positions(self, path: str, slots: Tensor) -> Tensor:
        """Return 0 .. C, int64 [C]."""

    def lengths(self, path: str, kv_len: Tensor) -> Tensor:
        """Lengths as int64 [B, Hkv, 1]."""

    def rank(self, path: str, score: Tensor, lengths: Tensor, positions: Tensor) -> Tensor:
        """Lift sinks and the last window above every score, and put empty slots below."""

    def best(self, path: str, ranked: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the `count` best: which of them are held, and their indices; ties keep the lower index."""

    def ascending(self, path: str, held: Tensor, chosen: Tensor, slots: Tensor, count: Tensor) -> Tensor:
        """Sort chosen positions [B, heads, count]; those not held become -1 at the tail; int32."""

    def counted(self, i: int, keep: Tensor) -> Kept:
        """Count what a list for each kv head keeps."""

    def cast(self, path: str, tensor: Tensor, dtype: npt.DTypeLike) -> Tensor:
        """Convert a tensor to an element type."""

    def filled(self, path: str, shape: Tensor, value: float) -> Tensor:
        """Return a float32 tensor of a shape, int64 [rank], that holds one value."""
