"""SnapKV: what the prompt's last queries attend to.

Source: SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469.
"""

from __future__ import annotations

from ortolan.graphs.evict_parts import EvictParts, Kept

LAYERS_AT_ONCE = 8  # for which positions are chosen together; the more, the fewer kernels, and the more memory


def keep_snapkv(parts: EvictParts) -> dict[int, Kept]:
    """Keep sinks, the last window, and the best-scored rest, per kv head, layer or model."""
    if parts.options.granularity == "kv_head":
        layers = list(parts.layers)
        groups = [layers[begin : begin + LAYERS_AT_ONCE] for begin in range(0, len(layers), LAYERS_AT_ONCE)]
        return {i: kept for members in groups for i, kept in parts.keep_best_together(members).items()}
    scores = parts.shared_scores()
    return {i: parts.keep_best(i, score, parts.budget) for i, score in scores.items()}
