"""KVzip in NumPy, from its definition: scores of a second reading, and a budget that the kv heads share.

Source: KVzip, arXiv 2505.23416, section 3.2; what differs is in the docstring of `ortolan.policies.kvzip`.
"""

from __future__ import annotations

import numpy as np


def largest_weights(attentions: np.ndarray, kv_heads: int, length: int, queries: int) -> np.ndarray:
    """Return the largest weight that the last queries of a group give each position, [Hkv, length].

    Args:
        attentions: softmax probabilities [Hq, T, T].
        kv_heads: Hkv.
        length: positions that are scored.
        queries: how many of the last queries score.
    """
    weights = attentions[:, -queries:, :length]
    return weights.reshape(kv_heads, -1, length).max(axis=1)


def keep_shared(scores: np.ndarray, *, budget: int, window: int, sink: int) -> list[np.ndarray]:
    """Return the positions of each kv head among the Hkv * budget best of a layer.

    Args:
        scores: [Hkv, length]; of equals, those of the lower head and then of the lower position are kept.
        budget, window, sink: as in the options.
    """
    heads, length = scores.shape
    forced = {*range(min(sink, length)), *range(max(length - window, 0), length)}
    own = [set(forced) for _ in range(heads)]
    bids = sorted((-scores[h, j], h, j) for h in range(heads) for j in range(length) if j not in forced)
    for _, head, position in bids[: max(0, heads * (budget - len(forced)))]:
        own[head].add(position)
    return [np.array(sorted(positions)) for positions in own]
