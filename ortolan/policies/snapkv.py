"""SnapKV: what the prompt's last queries attend to.

Source: SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ortolan.policies.base import shared_lists
from ortolan.policies.parts import Kept, Parts
from ortolan.policies.scored import ScoredEviction

LAYERS_AT_ONCE = 8  # for which positions are chosen together; the more, the fewer kernels, and the more memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKv(ScoredEviction):
    """SnapKV eviction, the same as `Eviction(policy="snapkv", ...)`.

    Attributes:
        budget: tokens kept in each full-attention layer.
        window: last queries that score, whose positions are always kept.
        kernel: odd width of the pooling along positions; at most 2 * max_context + 1 of the model.
        pool: "avg" or "max".
        sink: first positions, always kept.
        granularity: who shares a keep-list: each "kv_head" has its own, all of a "layer" share one, or the "model".
        group_reduce: over the query heads of a kv head: "mean", "max" or "sum".
        during_prefill: also evict after each chunk of a prompt; `Eviction` says more.

    Source: arXiv 2404.14469.
    """

    summary = "the positions that the prompt's last queries attend to most"

    policy: str = "snapkv"
    granularity: str = field(default="kv_head", metadata=shared_lists())

    def keep(self, parts: Parts) -> dict[int, Kept]:
        """Keep sinks, the last window, and the best-scored rest, per kv head, layer or model."""
        if not self.shares_lists:
            layers = list(parts.layers)
            groups = [layers[begin : begin + LAYERS_AT_ONCE] for begin in range(0, len(layers), LAYERS_AT_ONCE)]
            return {
                i: kept for members in groups for i, kept in parts.keep_best_together(members, self.scoring).items()
            }
        scores = parts.shared(self.scores(parts), self.granularity)
        return {i: parts.keep_best(i, score, parts.budget) for i, score in scores.items()}
