"""SnapKV's selection in NumPy: pooled scores, then the positions that are kept."""

import numpy as np

from ortolan.custom_ops import reference


def pool_scores(score, kernel, pool):
    """Pool along positions with stride 1 and the same length."""
    half = kernel // 2
    padded = np.pad(score, [(0, 0), (0, 0), (half, half)], constant_values=0 if pool == "avg" else -np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=2)
    return windows.mean(axis=-1) if pool == "avg" else windows.max(axis=-1)


def pooled_scores(layers, *, kernel, pool, granularity, group_reduce, scale=0.0, softcap=0.0):
    """Score every layer's (capture, key cache, kv_len); one [B, heads, C] for each, summed as asked."""
    pooled = [
        pool_scores(
            reference.snapkv_score(*layer, group_reduce=group_reduce, scale=scale, softcap=softcap), kernel, pool
        )
        for layer in layers
    ]
    if granularity != "kv_head":
        pooled = [p.sum(axis=1, keepdims=True) for p in pooled]
    if granularity == "model":
        pooled = [sum(pooled)] * len(pooled)
    return pooled


def select(pooled, length, *, budget, window, sink):
    """Keep sinks, the last window and the best of the rest, ascending; all where everything fits."""
    if length <= budget:
        return np.arange(length)
    forced = set(range(sink)) | set(range(length - window, length))
    rest = [j for j in range(length) if j not in forced]
    best = sorted(rest, key=lambda j: (-pooled[j], j))[: budget - len(forced)]
    return np.array(sorted(forced | set(best)))
