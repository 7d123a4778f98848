"""What attention over whole sequences gives, in float64 and in plain float32, computed where the results are.

Written from the operator's definition for NumPy and cupy alike: no cache, no pages, no kernels of ours.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import devices
import ml_dtypes
import numpy as np
from attention_matrix import CHUNKS, PREFIX_END, MatrixCase, Rows, sequence_rows
from tolerances import ERROR_FACTOR, ROUNDING_UNITS

DRAWN_ROWS = 8  # of a sequence, checked beside those at the edges
BLOCK_ROWS = 256  # queries of one head group at once, which bounds the memory of their logits


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What some positions of one sequence give: in float64, and in plain float32; [R, Hq, D] and [Hq, R] each."""

    positions: np.ndarray
    exact: tuple[Any, Any]
    plain: tuple[Any, Any]


def expect(case: MatrixCase, element: np.dtype, sequence: int, *, every_row: bool = False) -> Expected:
    """Compute the oracle of one sequence; cases that differ in chunks, pages or outputs share it."""
    chunks = "whole" if case.mask == "causal" else case.chunks  # else they bound what queries see
    shared = dataclasses.replace(case, chunks=chunks, batch="mixed", page_slots=0, lse=True)
    return _expect(shared, element, sequence, devices.current(), every_row)


@functools.lru_cache(maxsize=8)
def _expect(case: MatrixCase, element: np.dtype, sequence: int, device: str, every_row: bool) -> Expected:
    assert device == devices.current()
    rows = sequence_rows(case, element, sequence)
    count = len(rows.query)
    positions = np.arange(count) if every_row else checked_rows(case, count)
    exact, plain = (oracle(case, rows, positions, kind) for kind in (np.float64, np.float32))
    return Expected(positions=positions, exact=exact, plain=plain)


def checked_rows(case: MatrixCase, length: int) -> np.ndarray:
    """Positions where something changes - of sinks, window, chunks, rings and sequence - and a few drawn ones."""
    edges = {0, case.sink, length - 1, length - 3, PREFIX_END}
    if case.window > 0:
        edges |= {case.window, case.sink + case.window}
    for chunks in CHUNKS:
        cut = dataclasses.replace(case, chunks=chunks)
        edges |= {cut.chunk_size, cut.capacity, cut.capacity - case.sink}
    near = {edge + step for edge in edges for step in (-1, 0, 1)}
    drawn = np.random.default_rng(length).integers(0, length, DRAWN_ROWS).tolist()
    return np.array(sorted(p for p in {*near, *drawn} if 0 <= p < length))


def oracle(case: MatrixCase, rows: Rows, positions: np.ndarray, kind: type) -> tuple[Any, Any]:
    """Attend from some positions over the whole sequence in arithmetic of `kind`: output [R, Hq, D], lse [Hq, R]."""
    xp = devices.array_module()
    query, keys, values = (devices.widen(x, kind) for x in (rows.query, rows.key, rows.value))
    _, heads, size = query.shape
    output, lse = xp.empty((len(positions), heads, size), kind), xp.empty((heads, len(positions)), kind)
    group = case.group
    for begin in range(0, len(positions), BLOCK_ROWS):
        block = slice(begin, begin + BLOCK_ROWS)
        i = positions[block]
        rows, seen = query[xp.asarray(i)], visible_keys(case, i, len(keys))
        end, visible = seen.shape[1], xp.asarray(seen)
        for head in range(0, heads, group):
            logits = rows[:, head : head + group].reshape(-1, size) @ keys[:end, head // group].T
            logits = logits.reshape(len(i), group, -1) * kind(size**-0.5)
            logits = xp.where(visible[:, None], logits, kind(-np.inf))
            largest = logits.max(axis=2, keepdims=True)
            weights = xp.exp(logits - largest)
            total = weights.sum(axis=2, keepdims=True)
            sums = weights.reshape(len(i) * group, -1) @ values[:end, head // group]
            output[block, head : head + group] = sums.reshape(len(i), group, size) / total
            lse[head : head + group, block] = (largest + xp.log(total))[:, :, 0].T
    return output, lse


def visible_keys(case: MatrixCase, positions: np.ndarray, length: int) -> np.ndarray:
    """Say which keys each of some ascending positions sees, up to the last one that any may see: [R, K]."""
    step_end = case.step_ends(length)[positions][:, None]
    i, j = positions[:, None], np.arange(positions[-1] + 1 if case.mask == "causal" else step_end[-1, 0])
    near = (case.window < 0) | (j > i - case.window) | (j < case.sink)
    if case.mask == "both":
        ahead = (case.window < 0) | (j < i + case.window) | (j < case.sink)
        return (j < step_end) & near & ahead
    prefix = (i < PREFIX_END) & (j < min(PREFIX_END, length)) & (j < step_end)
    return ((j <= i) & near) | (prefix & (case.mask == "prefix"))


def share_of_allowed(actual: Any, plain: Any, exact: Any, stored: np.dtype, least_size: float = 0.0) -> float:
    """Return the largest error as a share of what tolerances.py allows; NaN where a value is no number.

    Args:
        actual: float32, of values that were kept as `stored`.
        plain: float32.
        exact: float64.
        stored: the type whose rounding is allowed for.
        least_size: the size of values that rounding is counted at, at least. A log-sum-exp of one key is a sum of
            products that may cancel: its rounding is that of the products.
    """
    allowed = ERROR_FACTOR * abs(devices.rounded(plain, stored) - exact).max()
    allowed += ROUNDING_UNITS * float(ml_dtypes.finfo(stored).eps) * max(abs(exact).max(), least_size)
    return float(abs(actual - exact).max() / allowed)
