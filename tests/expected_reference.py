"""ExpectedAttention restated in NumPy and float64, by positions and rotation matrices as its paper states it."""

import math

import numpy as np

FUTURE = 512


def rotation(position: float, inv_freq: np.ndarray, size: int) -> np.ndarray:
    """Return RoPE's matrix [D, D] at a position; pairs are (r, R + r), elements past 2 R stay."""
    half, matrix = len(inv_freq), np.eye(size)
    for r, frequency in enumerate(inv_freq):
        cosine, sine = math.cos(position * frequency), math.sin(position * frequency)
        matrix[r, r] = matrix[half + r, half + r] = cosine
        matrix[r, half + r], matrix[half + r, r] = -sine, sine
    return matrix


def expected_scores(
    queries: np.ndarray,
    first: int,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    inv_freq: np.ndarray,
    sink: int,
    scale: float = 0.0,
    group_reduce: str = "mean",
) -> np.ndarray:
    """Score every position by queries after RoPE, at positions first .. first + n; [Hkv, L].

    Args:
        queries: [n, Hq, D], the newest last.
        first: position of the first of them.
        keys: [Hkv, L, D], after RoPE; values likewise.
        values: [Hkv, L, D].
        inv_freq: [R].
        sink: first positions that get 0.
        scale: of the softmax; 0 for 1 / sqrt(D).
        group_reduce: over the query heads of a kv head.
    """
    count, heads, size = queries.shape
    kv_heads, length, _ = keys.shape
    following = first + count
    average = np.mean([rotation(p, inv_freq, size) for p in range(following, following + FUTURE)], axis=0)
    back = [rotation(-(first + i), inv_freq, size) for i in range(count)]
    scale = scale or 1 / math.sqrt(size)
    weights = np.zeros((heads, length))
    for head in range(heads):
        plain = np.array([back[i] @ queries[i, head].astype(np.float64) for i in range(count)])
        mean = average @ plain.mean(axis=0)
        covariance = average @ np.cov(plain, rowvar=False, bias=True).reshape(size, size) @ average.T
        k = keys[head * kv_heads // heads, sink:].astype(np.float64)
        exponents = scale * k @ mean + scale**2 / 2 * np.einsum("ni,ij,nj->n", k, covariance, k)
        weights[head, sink:] = np.exp(exponents - exponents.max())
        weights[head] /= weights[head].sum()
    reduce = {"mean": np.mean, "max": np.max, "sum": np.sum}[group_reduce]
    grouped = reduce(weights.reshape(kv_heads, heads // kv_heads, length), axis=1)
    return grouped * np.linalg.norm(values.astype(np.float64), axis=2)
