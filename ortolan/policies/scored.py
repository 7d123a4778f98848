"""What the policies share that score positions by the captured queries, as SnapKV does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ortolan.errors import ConfigError
from ortolan.policies.base import POOLS, choice, reduced_groups, whole
from ortolan.policies.eviction import Eviction
from ortolan.policies.parts import Parts, Scoring, Tensor

if TYPE_CHECKING:
    from ortolan.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEviction(Eviction):
    """A policy that scores by the attention of the captured queries, and pools along positions.

    Attributes:
        kernel: odd width of the pooling along positions; at most 2 * max_context + 1 of the model.
        pool: "avg" or "max".
        group_reduce: over the query heads of a kv head: "mean", "max" or "sum".
    """

    kernel: int = field(default=5, metadata=whole("width of the pooling along positions", odd=True, shapes_graph=True))
    pool: str = field(default="avg", metadata=choice("pooling along positions", POOLS))
    group_reduce: str = field(default="mean", metadata=reduced_groups())

    @property
    def scoring(self) -> Scoring:
        """How positions are scored."""
        return Scoring(kernel=self.kernel, pool=self.pool, group_reduce=self.group_reduce)

    def check(self, manifest: Manifest) -> None:
        """Check that a model has what the policy needs. Raises ConfigError, also for a kernel that is too wide."""
        Eviction.check(self, manifest)
        widest = 2 * manifest.max_context + 1  # reaches all positions from each; wider ones only take longer
        if self.kernel > widest:
            raise ConfigError(
                f"eviction kernel is {self.kernel}; it must be at most {widest} in a model of max_context "
                f"{manifest.max_context}"
            )

    def scores(self, parts: Parts) -> dict[int, Tensor]:
        """Score all layers' positions: [B, Hkv, C] each."""
        return {i: parts.pooled_score(i, self.scoring) for i in parts.layers}
