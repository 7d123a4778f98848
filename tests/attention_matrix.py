"""The matrix of attention: its axes, one case of it, and the sequences that it reads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

WINDOWS = (-1, 32, 256, 512, 1024)
SINKS = (0, 1, 8, 128)
LENGTHS = (512, 1024, 2048, 4096)
HEADS = {1: (2, 2), 4: (8, 2), 8: (8, 1)}  # query and kv heads of each group size
HEAD_SIZES = (64, 128, 256)
PAGES = (0, 16, 32)  # slots; 0: contiguous
CHUNKS = ("whole", "even", "odd")
BATCHES = ("one", "mixed")
MASKS = ("causal", "both", "prefix")
PREFIX_END = 100
RING_MULTIPLE = 32  # slots; whole pages of either size, and no whole tiles of any kernel


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
        mask: "causal", "both" directions as far as the step reaches, or a "prefix" of PREFIX_END positions.
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
    mask: str = "causal"

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
        keeps_all = self.window < 0 or (self.mask == "prefix" and self.sink < PREFIX_END)
        slots = self.length if keeps_all else min(self.length, ring)
        return -(-max(slots, self.sink + max(self.window, 1)) // RING_MULTIPLE) * RING_MULTIPLE

    def steps(self) -> Iterator[list[tuple[int, int]]]:
        """Yield each step's half-open range of tokens of each sequence; some are empty."""
        cuts = [self._cuts(length) for length in self.lengths]
        for number in range(max(map(len, cuts))):
            yield [c[number] if number < len(c) else (n, n) for c, n in zip(cuts, self.lengths, strict=True)]

    def step_ends(self, length: int) -> np.ndarray:
        """Return, for each position of a sequence of some length, the end of the step that reads it: [L]."""
        return np.concatenate([np.full(end - begin, end) for begin, end in self._cuts(length)])

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


def variants(case: MatrixCase) -> Iterator[MatrixCase]:
    """Yield the same case with every page size, with and without log-sum-exp."""
    for page_slots in PAGES:
        for lse in (True, False):
            yield dataclasses.replace(case, page_slots=page_slots, lse=lse)
