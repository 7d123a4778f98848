"""The matrix of attention: its axes, one case of it, its runs on a device and its oracle."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import devices
import numpy as np
import numpy.typing as npt
from resident import Resident, run_resident
from tolerances import assert_as_good_as_plain

WINDOWS = (-1, 32, 256, 512, 1024)
SINKS = (0, 1, 8, 128)
LENGTHS = (512, 1024, 2048, 4096)
HEADS = {1: (2, 2), 4: (8, 2), 8: (8, 1)}  # query and kv heads of each group size
HEAD_SIZES = (64, 128, 256)
PAGES = (0, 16, 32)  # slots; 0: contiguous
CHUNKS = ("whole", "even", "odd")
BATCHES = ("one", "mixed")
RING_MULTIPLE = 32  # slots; whole pages of either size, and no whole tiles of any kernel
DRAWN_ROWS = 8  # of a sequence, checked beside those at the edges


@dataclass(frozen=True, kw_only=True)
class MatrixCase:
    """One cell of the matrix; the element type is that of the device under test.

    Attributes:
        window: W; -1 for causal.
        sink: S.
        group: query heads per kv head.
        head_size: D.
        length: of the longest sequence.
        chunks: "whole" prompts, "even" chunks of 256, or "odd" ones of 100 and the last three tokens one by one.
        batch: "one" sequence, or "mixed" lengths: that, a third, one token, and a few less.
        page_slots: P; 0 for contiguous caches.
        lse: whether the log-sum-exp is asked for.
    """

    window: int
    sink: int
    group: int
    head_size: int
    length: int
    chunks: str
    batch: str
    page_slots: int = 0
    lse: bool = True

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [self.length] if self.batch == "one" else [self.length, self.length // 3 + 5, 1, self.length - 7]

    @property
    def chunk_size(self) -> int:
        """Most tokens of a sequence in one step."""
        return {"whole": self.length, "even": 256, "odd": 100}[self.chunks]

    @property
    def capacity(self) -> int:
        """C: the least that the contract allows, in whole pages."""
        ring = max(self.sink + self.window - 1 + self.chunk_size, self.sink + self.window)
        slots = self.length if self.window < 0 else min(self.length, ring)
        return -(-max(slots, self.sink + max(self.window, 1)) // RING_MULTIPLE) * RING_MULTIPLE

    def steps(self) -> Iterator[list[tuple[int, int]]]:
        """Yield each step's half-open range of tokens of each sequence; some are empty."""
        cuts = [self._cuts(length) for length in self.lengths]
        for number in range(max(map(len, cuts))):
            yield [c[number] if number < len(c) else (n, n) for c, n in zip(cuts, self.lengths, strict=True)]

    def _cuts(self, length: int) -> list[tuple[int, int]]:
        tail = min(length, 3) if self.chunks == "odd" else 0
        body = [(i, min(i + self.chunk_size, length - tail)) for i in range(0, length - tail, self.chunk_size)]
        return [*body, *((i, i + 1) for i in range(length - tail, length))]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Queries [L, Hq, D], keys and values [L, Hkv, D] of one sequence."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


@functools.lru_cache(maxsize=8)
def draw_rows(length: int, group: int, head_size: int, element: np.dtype, seed: int) -> Rows:
    """Draw one sequence; shorter ones are its beginnings."""
    rng, (heads, kv_heads) = np.random.default_rng(seed), HEADS[group]

    def draw(count: int) -> np.ndarray:
        return rng.standard_normal((length, count, head_size), dtype=np.float32).astype(element)

    return Rows(query=draw(heads), key=draw(kv_heads), value=draw(kv_heads))


def rows_of(case: MatrixCase, element: np.dtype) -> list[Rows]:
    """Draw the sequences of a case; they depend on its sizes alone."""
    return [sequence_rows(case, element, sequence) for sequence in range(len(case.lengths))]


def sequence_rows(case: MatrixCase, element: np.dtype, sequence: int) -> Rows:
    """Draw one sequence of a case."""
    rows, n = draw_rows(case.length, case.group, case.head_size, element, sequence), case.lengths[sequence]
    return Rows(query=rows.query[:n], key=rows.key[:n], value=rows.value[:n])


def nan_filled(shape: tuple[int, ...], element: npt.DTypeLike) -> np.ndarray:
    """Return an array of NaN, whose bits are all set in every floating type."""
    size = math.prod(shape) * np.dtype(element).itemsize
    return np.full(size, 0xFF, np.uint8).view(element).reshape(shape)


class LayerCaches:
    """Key and value caches of a case, full of NaN, and the two operators around them."""

    def __init__(self, case: MatrixCase, element: np.dtype) -> None:
        self._case, self._element = case, element
        sequences, kv_heads = len(case.lengths), HEADS[case.group][1]
        slots, pages, self._table = case.capacity, sequences, {}
        if case.page_slots:
            each = slots // case.page_slots
            slots, pages = case.page_slots, sequences * each + 2
            table = np.random.default_rng(7).permutation(pages)[: sequences * each].reshape(sequences, each)
            self._table = {"block_table": Resident.of(table.astype(np.int32))}
        empty = nan_filled((pages, kv_heads, slots, case.head_size), element)
        self._caches = {"key_cache": Resident.of(empty), "value_cache": Resident.of(empty)}

    def step(self, rows: list[Rows], ranges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray | None]:
        """Append and attend; returns output [T, Hq, D] and lse [Hq, T]."""
        case, spans = self._case, list(zip(rows, ranges, strict=True))
        packed = {
            port: Resident.of(np.concatenate([getattr(r, port)[a:b] for r, (a, b) in spans]))
            for port in ("query", "key", "value")
        }
        lengths = {
            "query_start": Resident.of(np.cumsum([0, *(b - a for a, b in ranges)]).astype(np.int32)),
            "past_len": Resident.of(np.array([a for a, _ in ranges], np.int32)),
            **self._table,
        }
        new = {"key": packed["key"], "value": packed["value"]}
        run_resident("RingKvAppend", {**new, **self._caches, **lengths}, {}, sink=case.sink)
        tokens, heads, size = packed["query"].shape
        results = {"output": Resident.of(nan_filled((tokens, heads, size), self._element))}
        if case.lse:
            results["lse"] = Resident.of(nan_filled((heads, tokens), np.float32))
        attend = {"query": packed["query"], **self._caches, **lengths}
        run_resident("SwaAttention", attend, results, window=case.window, sink=case.sink)
        return results["output"].numpy(), results["lse"].numpy() if case.lse else None


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What all queries of one sequence gave: output [L, Hq, D], and lse [Hq, L] where it was asked for."""

    output: np.ndarray
    lse: np.ndarray | None


def run_case(case: MatrixCase, element: np.dtype) -> list[Attended]:
    """Read all sequences of a case, step by step, on the device under test."""
    rows, caches = rows_of(case, element), LayerCaches(case, element)
    outputs: list[list[np.ndarray]] = [[] for _ in rows]
    sums: list[list[np.ndarray]] = [[] for _ in rows]
    for ranges in case.steps():
        output, lse = caches.step(rows, ranges)
        begin = 0
        for sequence, (a, b) in enumerate(ranges):
            outputs[sequence].append(output[begin : begin + b - a])
            if lse is not None:
                sums[sequence].append(lse[:, begin : begin + b - a])
            begin += b - a
    return [
        Attended(output=np.concatenate(o), lse=np.concatenate(s, axis=1) if s else None)
        for o, s in zip(outputs, sums, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What some positions of one sequence give: in float64, and in plain float32; [R, Hq, D] and [Hq, R] each."""

    positions: np.ndarray
    exact: tuple[np.ndarray, np.ndarray]
    plain: tuple[np.ndarray, np.ndarray]


def expect(case: MatrixCase, element: np.dtype, sequence: int) -> Expected:
    """Compute the oracle of one sequence; cases that differ in chunks, pages or outputs share it."""
    return _expect(dataclasses.replace(case, chunks="whole", batch="mixed", page_slots=0, lse=True), element, sequence)


@functools.lru_cache(maxsize=8)
def _expect(case: MatrixCase, element: np.dtype, sequence: int) -> Expected:
    rows = sequence_rows(case, element, sequence)
    positions = checked_rows(case, len(rows.query))
    exact, plain = (oracle(case, rows, positions, kind) for kind in (np.float64, np.float32))
    return Expected(positions=positions, exact=exact, plain=plain)


def checked_rows(case: MatrixCase, length: int) -> np.ndarray:
    """Positions where something changes - of sinks, window, chunks, rings and sequence - and a few drawn ones."""
    edges = {0, case.sink, length - 1, length - 3}
    if case.window > 0:
        edges |= {case.window, case.sink + case.window}
    for chunks in CHUNKS:
        cut = dataclasses.replace(case, chunks=chunks)
        edges |= {cut.chunk_size, cut.capacity, cut.capacity - case.sink}
    near = {edge + step for edge in edges for step in (-1, 0, 1)}
    drawn = np.random.default_rng(length).integers(0, length, DRAWN_ROWS).tolist()
    return np.array(sorted(p for p in {*near, *drawn} if 0 <= p < length))


def oracle(case: MatrixCase, rows: Rows, positions: np.ndarray, element: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Attend from some positions over the whole sequence in `element` arithmetic: output [R, Hq, D], lse [Hq, R]."""
    group, size = case.group, case.head_size
    j, i = np.arange(len(rows.key)), positions[:, None]
    visible = (j <= i) & ((case.window < 0) | (j > i - case.window) | (j < case.sink))  # [R, L]
    heads = rows.query.shape[1]
    output = np.zeros((len(positions), heads, size), element)
    lse = np.zeros((heads, len(positions)), element)
    for kv_head in range(heads // group):
        keys, values = (x[:, kv_head].astype(element) for x in (rows.key, rows.value))
        for h in range(kv_head * group, (kv_head + 1) * group):
            logits = rows.query[positions, h].astype(element) @ keys.T * element(size**-0.5)
            logits = np.where(visible, logits, element(-np.inf))
            largest = logits.max(axis=1, keepdims=True)
            weights = np.exp(logits - largest)
            total = weights.sum(axis=1, keepdims=True)
            output[:, h] = weights @ values / total
            lse[h] = (largest + np.log(total))[:, 0]
    return output, lse


def check_against_oracle(case: MatrixCase, results: list[Attended]) -> None:
    """Compare some rows of each sequence with float64, allowing what float32 of the stored type is off."""
    for sequence, got in enumerate(results):
        assert np.isfinite(got.output.astype(np.float32)).all(), "a query read a slot that it does not see"
        expected = expect(case, devices.element(), sequence)
        positions = expected.positions
        assert_as_good_as_plain(got.output[positions], expected.plain[0], expected.exact[0])
        if got.lse is not None:
            assert_as_good_as_plain(got.lse[:, positions], expected.plain[1], expected.exact[1])


def check_same_bits(results: list[Attended], expected: list[Attended]) -> None:
    """Compare every query of each sequence bit for bit, and the log-sum-exp where both have it."""
    for got, want in zip(results, expected, strict=True):
        devices.assert_same_bits(got.output, want.output)
        if got.lse is not None:
            devices.assert_same_bits(got.lse, want.lse)


def variants(case: MatrixCase) -> Iterator[MatrixCase]:
    """Yield the same case with every page size, with and without log-sum-exp."""
    for page_slots in PAGES:
        for lse in (True, False):
            yield dataclasses.replace(case, page_slots=page_slots, lse=lse)
