"""SnapKV: what the prompt's last queries attend to.

Source: SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469.
"""

from __future__ import annotations

from ortolan.graphs.builder import Tensor
from ortolan.graphs.evict_parts import EvictParts


def keep_snapkv(parts: EvictParts) -> dict[int, Tensor]:
    """Keep sinks, the last window, and the best-scored rest, per kv head, layer or model."""
    shared = parts.options.granularity != "kv_head"
    scores = parts.shared_scores()
    return {i: parts.keep_best(i, score, parts.budget, shared=shared) for i, score in scores.items()}
