"""AdaKV: SnapKV whose kv heads share one budget, so that a head which needs more positions gets them.

Source: Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, arXiv 2407.11550, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from ortolan.policies.parts import Kept, Parts
from ortolan.policies.scored import ScoredEviction
from ortolan.policies.shared_budget import keep_of_all_heads

SAFEGUARD_PERCENT = 20  # of the budget, which every head keeps whatever the others score


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaKv(ScoredEviction):
    """SnapKV whose kv heads share `budget` times their number, so each head has a list of its own."""

    summary = "as snapkv; the kv heads of a layer share their budgets"
    keeps_uneven = True

    policy: str = "adakv"

    def keep(self, parts: Parts) -> dict[int, Kept]:
        """Keep Hkv * budget positions of a layer: each head's safeguarded best, then the best of all heads."""
        return {i: keep_of_all_heads(parts, i, score, SAFEGUARD_PERCENT) for i, score in self.scores(parts).items()}
