"""The operators in NumPy and float64, written to be obviously right; the oracle of every kernel's tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ortolan.custom_ops.low_bit_cache_reference import dequantise, holds_codes, quantise

Array: TypeAlias = npt.NDArray[np.generic]
Floats: TypeAlias = npt.NDArray[np.float64]


def slot_of(position: int, capacity: int, sink: int) -> int:
    """Return the slot of a position: the identity for sinks, a ring of capacity - sink slots after them."""
    return position if position < sink else sink + (position - sink) % (capacity - sink)


def _capacity(cache: Array, block_table: Array | None, capacity: int) -> int:
    pages = 1 if block_table is None else block_table.shape[1]
    return capacity or pages * cache.shape[2]


def _locate(cache: Array, block_table: Array | None, sequence: int, slot: int) -> tuple[int, int]:
    """Return (page, row) of a slot."""
    page_slots = cache.shape[2]
    if block_table is None:
        return sequence, slot
    return int(block_table[sequence, slot // page_slots]), slot % page_slots


def _length(lengths: Array, sequence: int, head: int) -> int:
    """Read a length that is given per sequence [B] or per kv head [B, Hkv]."""
    return int(lengths[sequence, head] if lengths.ndim == 2 else lengths[sequence])


def ring_kv_append(
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    query_start: Array,
    past_len: Array,
    block_table: Array | None = None,
    key_scale: Array | None = None,
    value_scale: Array | None = None,
    *,
    sink: int = 0,
    capacity: int = 0,
) -> tuple[Array, ...]:
    """Write keys and values [T, Hkv, D] into copies of the caches [N, Hkv, P, D], token by token in order.

    Caches of codes have scales [N, Hkv, P], copies of which come last.
    """
    if key_scale is not None and value_scale is not None:
        (key, key_rows), (value, value_rows) = quantise(key, key_cache.dtype), quantise(value, value_cache.dtype)
        step = query_start, past_len, block_table
        codes = ring_kv_append(key, value, key_cache, value_cache, *step, sink=sink, capacity=capacity)
        rows = key_rows[..., None], value_rows[..., None]
        pools = key_scale[..., None], value_scale[..., None]
        scales = ring_kv_append(rows[0], rows[1], pools[0], pools[1], *step, sink=sink, capacity=capacity)
        return *codes, *(scale[..., 0] for scale in scales)
    keys, values = key_cache.copy(), value_cache.copy()
    slots = _capacity(key_cache, block_table, capacity)
    for sequence in range(len(query_start) - 1):
        for head in range(key.shape[1]):
            position = _length(past_len, sequence, head)
            for row in range(query_start[sequence], query_start[sequence + 1]):
                page, slot_row = _locate(key_cache, block_table, sequence, slot_of(position, slots, sink))
                keys[page, head, slot_row] = key[row, head]
                values[page, head, slot_row] = value[row, head]
                position += 1
    return keys, values


def visible_positions(
    position: int, window: int, sink: int, *, length: int | None = None, causal: bool = True, prefix_end: int = 0
) -> list[int]:
    """List the positions that the query at `position` sees, ascending.

    Args:
        position: of the query.
        window: W; -1 for none.
        sink: S.
        length: tokens in the cache; None where the query's is the last.
        causal: whether a query sees no later key, prefixes apart.
        prefix_end: positions before it see each other.
    """

    def sees(j: int) -> bool:
        if not causal:
            return window < 0 or abs(position - j) < window or j < sink
        if position < prefix_end and j < prefix_end:
            return True
        return j <= position and (window < 0 or j > position - window or j < sink)

    return [j for j in range(position + 1 if length is None else length) if sees(j)]


def swa_attention(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    query_start: Array,
    past_len: Array,
    block_table: Array | None = None,
    sink_logits: Array | None = None,
    prefix_end: Array | None = None,
    key_scale: Array | None = None,
    value_scale: Array | None = None,
    *,
    window: int = -1,
    sink: int = 0,
    capacity: int = 0,
    scale: float = 0.0,
    softcap: float = 0.0,
    causal: int = 1,
) -> tuple[Floats, Floats]:
    """Attend from queries [T, Hq, D] to the cache; returns output [T, Hq, D] and lse [Hq, T]."""
    key_cache, value_cache = _values(key_cache, key_scale), _values(value_cache, value_scale)
    tokens, heads, _ = query.shape
    group = heads // key_cache.shape[1]
    slots = _capacity(key_cache, block_table, capacity)
    output = np.zeros(query.shape)
    lse = np.full((heads, tokens), -np.inf)
    for sequence in range(len(query_start) - 1):
        prefix = 0 if prefix_end is None else int(prefix_end[sequence])
        for row in range(query_start[sequence], query_start[sequence + 1]):
            for head in range(heads):
                past = _length(past_len, sequence, head // group)
                length = past + int(query_start[sequence + 1] - query_start[sequence])
                position = past + int(row - query_start[sequence])
                seen = visible_positions(position, window, sink, length=length, causal=bool(causal), prefix_end=prefix)
                where = [_locate(key_cache, block_table, sequence, slot_of(j, slots, sink)) for j in seen]
                keys = np.array([key_cache[page, head // group, r] for page, r in where], np.float64)
                values = np.array([value_cache[page, head // group, r] for page, r in where], np.float64)
                logits = _logits(query[row, head].astype(np.float64), keys, scale, softcap)
                extra = [] if sink_logits is None else [float(sink_logits[head])]
                largest = max([*logits, *extra])
                weights = np.exp(logits - largest)
                total = weights.sum() + sum(math.exp(z - largest) for z in extra)
                output[row, head] = weights @ values / total
                lse[head, row] = largest + math.log(total)
    return output, lse


def _values(cache: Array, scale: Array | None) -> Array:
    """Return what a cache stands for."""
    return dequantise(cache, scale) if scale is not None and holds_codes(cache) else cache


def _logits(query: Floats, keys: Floats, scale: float, softcap: float) -> Floats:
    """Return the scaled and softcapped products of one query [D] with keys [K, D]."""
    z = (scale or 1 / math.sqrt(len(query))) * (keys @ query)
    return softcap * np.tanh(z / softcap) if softcap else z


def snapkv_capture(query: Array, capture: Array, query_start: Array, past_len: Array) -> Array:
    """Copy queries [T, Hq, D] into row (position mod Wq) of a copy of capture [B, Wq, Hq, D]."""
    result = capture.copy()
    rows = capture.shape[1]
    for sequence in range(len(query_start) - 1):
        for row in range(query_start[sequence], query_start[sequence + 1]):
            if rows:
                position = int(past_len[sequence]) + int(row - query_start[sequence])
                result[sequence, position % rows] = query[row]
    return result


def snapkv_score(
    capture: Array,
    key_cache: Array,
    kv_len: Array,
    block_table: Array | None = None,
    key_scale: Array | None = None,
    *,
    scale: float = 0.0,
    softcap: float = 0.0,
    group_reduce: str = "mean",
    query_reduce: str = "mean",
) -> Floats:
    """Score cached positions by the captured queries [B, Wq, Hq, D]; returns [B, Hkv, C].

    Of each query head, the mean or the largest of the queries' probabilities counts; then the group's are reduced.

    The newest query is the one at position kv_len - 1 of this cache, in row (kv_len - 1) mod Wq. Once a cache
    was evicted, that row differs from the one SnapKvCapture wrote, so the caller rotates the rows first.

    Source: SnapKV, arXiv 2404.14469, section 4; the largest: KVzip, arXiv 2505.23416, section 3.2.
    """
    key_cache = _values(key_cache, key_scale)
    sequences, rows, heads, _ = capture.shape
    kv_heads = key_cache.shape[1]
    group = heads // kv_heads
    slots = _capacity(key_cache, block_table, 0)
    over_queries: Callable[[Floats], Floats] = {"mean": _mean, "max": _max}[query_reduce]
    reduce: Callable[[Floats], Floats] = {"mean": _mean, "max": _max, "sum": _sum}[group_reduce]
    score = np.zeros((sequences, kv_heads, slots))
    for sequence in range(sequences):
        for head in range(kv_heads):
            length = _length(kv_len, sequence, head)
            count = min(rows, length)
            where = [_locate(key_cache, block_table, sequence, j) for j in range(length)]
            keys = np.array([key_cache[page, head, r] for page, r in where], np.float64)
            if count == 0:
                continue
            weights = np.zeros((count, group, length))
            for g in range(group):
                for n, position in enumerate(range(length - count, length)):
                    query = capture[sequence, position % rows, head * group + g].astype(np.float64)
                    logits = _logits(query, keys[: position + 1], scale, softcap)
                    exponentials = np.exp(logits - logits.max())
                    weights[n, g, : position + 1] = exponentials / exponentials.sum()
            score[sequence, head, : length - count] = reduce(over_queries(weights))[: length - count]
    return score


def _mean(values: Floats) -> Floats:
    return np.asarray(values.mean(axis=0))


def _max(values: Floats) -> Floats:
    return np.asarray(values.max(axis=0))


def _sum(values: Floats) -> Floats:
    return np.asarray(values.sum(axis=0))


def kv_select(
    score: Array, kv_len: Array, budget: Array, window: Array, sink: Array
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Choose positions of scores [B, Hkv or 1, C]: sinks and the last window, then the best, ties by position."""
    batch, lists, slots = score.shape
    count = min(int(budget[0]), slots)
    keep, kept_len = np.full((batch, lists, count), -1, np.int32), np.zeros(kv_len.shape, np.int32)
    for sequence in range(batch):
        for head in range(lists):
            length = int(kv_len[sequence].min() if lists == 1 else kv_len[sequence, head])
            forced = [p for p in range(length) if p < sink[0] or p >= length - window[0]]
            rest = [p for p in sorted({*range(length)} - {*forced}) if score[sequence, head, p] >= 0]
            rest.sort(key=lambda p: (-score[sequence, head, p], p))
            chosen = sorted((forced + rest)[:count])
            keep[sequence, head, : len(chosen)] = chosen
            kept_len[sequence, slice(None) if lists == 1 else head] = len(chosen)
    return keep, kept_len


def kv_compact(
    key_cache: Array,
    value_cache: Array,
    keep: Array,
    block_table: Array | None = None,
    key_scale: Array | None = None,
    value_scale: Array | None = None,
) -> tuple[Array, ...]:
    """Copy row keep[b, h, k] of a head to its row k; -1 ends a list, `keep` [B, 1, K] serves every head.

    Caches of codes have scales [N, Hkv, P], which move with their rows; copies of them come last.
    """
    if key_scale is not None and value_scale is not None:
        codes = kv_compact(key_cache, value_cache, keep, block_table)
        scales = kv_compact(key_scale[..., None], value_scale[..., None], keep, block_table)
        return *codes, *(scale[..., 0] for scale in scales)
    keys, values = key_cache.copy(), value_cache.copy()
    for sequence in range(keep.shape[0]):
        for head in range(key_cache.shape[1]):
            positions = keep[sequence, 0 if keep.shape[1] == 1 else head]
            for target, source in enumerate(positions[positions >= 0]):
                to_page, to_row = _locate(key_cache, block_table, sequence, target)
                from_page, from_row = _locate(key_cache, block_table, sequence, int(source))
                keys[to_page, head, to_row] = key_cache[from_page, head, from_row]
                values[to_page, head, to_row] = value_cache[from_page, head, from_row]
    return keys, values
