"""SnapKV: what the prompt's last queries attend to.

Source: SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469.
"""

from __future__ import annotations

from ortolan.graphs.evict_parts import EvictParts, Kept


def keep_snapkv(parts: EvictParts) -> dict[int, Kept]:
    """Keep sinks, the last window, and the best-scored rest, per kv head, layer or model."""
    scores = parts.shared_scores()
    return {i: parts.keep_best(i, score, parts.budget) for i, score in scores.items()}
