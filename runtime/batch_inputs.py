"""Lays the inputs of a step of many sequences out in one block of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ortolan import contract
from ortolan.manifest import Manifest
from ortolan.runtime.buffers import Array
from ortolan.runtime.options import Sampling
from ortolan.runtime.sampler import Sampler
from ortolan.runtime.step_inputs import ALIGNMENT, Field

Lengths = Mapping[int, npt.NDArray[np.int32]]


@dataclass(slots=True, eq=False, kw_only=True)
class Choice:
    """How one sequence's tokens are chosen; the same object for all its steps.

    Attributes:
        sampling: the rules.
        sampler: draws on the host.
        seed: of draws on a device, which depend on it and on the number of tokens alone.
        tokens: the sequence so far.
    """

    sampling: Sampling
    sampler: Sampler
    seed: int
    tokens: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence's part of a step.

    Attributes:
        tokens: to feed, at least one.
        logical: tokens read before.
        pages: of each kind, in the order of their slots.
        variant: of RoPE.
        physical: tokens in the cache of each evictable layer, per kv head [Hkv]; empty: all hold `logical`.
        captures: for each evictable layer the buffer [1, Wq, Hq, D] that takes queries; empty: none are taken.
        choice: how the token after these is chosen; None: it is known, or not wanted.
        source: row of the step before whose choice is this row's only token, whatever `tokens` says; None: `tokens`
            are known.
    """

    tokens: Sequence[int]
    logical: int
    pages: Mapping[str, Sequence[int]]
    variant: int = 0
    physical: Lengths = field(default_factory=dict)
    captures: Mapping[int, Array] = field(default_factory=dict)
    choice: Choice | None = None
    source: int | None = None


class BatchLayout:
    """Places the inputs of a step of `sequences` sequences and `tokens` tokens.

    A step on CUDA may have fewer of both: the sequences left over have no tokens, and the rows past the last token
    belong to nobody. Physical lengths are followed by block tables, which come last, so that each kind is one range.
    """

    def __init__(self, manifest: Manifest, tokens: int, sequences: int, columns: Mapping[str, int]) -> None:
        """Place the inputs; `columns` are those of each kind's block table."""
        self.tokens, self.sequences = tokens, sequences
        self._manifest = manifest
        self._bytes = 0
        self._entries: dict[str, list[int]] = {}  # of each row of the tables
        heads = {i: layer.num_kv_heads for i, layer in enumerate(manifest.layers) if layer.evictable}
        self.token_ids = self._place((tokens,), "int64")
        self.positions = self._place((tokens,), "int64")
        self.rope_variant = self._place((tokens,), "int64")
        self.query_start = self._place((sequences + 1,), "int32")
        self.logit_rows = self._place((sequences,), "int64")
        self.past_len = self._place((sequences,), "int32")
        self.kv_begin = self._bytes
        self.kv_len = {i: self._place((sequences, count), "int32") for i, count in heads.items()}
        self.tables_begin = self._bytes  # all before it are small
        self.tables = {
            kind.name: self._place((sequences, columns[kind.name]), "int32") for kind in manifest.cache_kinds
        }

    @property
    def bytes(self) -> int:
        """Bytes of the block."""
        return self._bytes

    def fill(self, block: npt.NDArray[np.uint8], rows: Sequence[Row], no_page: int) -> None:
        """Write the inputs of a step to a host block; `no_page` stands in tables past the pages in use."""
        counts = [len(row.tokens) for row in rows]
        used = sum(counts)
        starts = self.query_start.view(block)
        starts[: len(rows) + 1] = np.cumsum([0, *counts])
        starts[len(rows) :] = used
        self.logit_rows.view(block)[:] = np.maximum(starts[1:] - 1, 0)
        for place in (self.token_ids, self.positions, self.rope_variant):
            place.view(block)[used:] = 0
        self.token_ids.view(block)[:used] = [token for row in rows for token in row.tokens]
        self.rope_variant.view(block)[:used] = np.repeat([row.variant for row in rows], counts)
        self._fill_lengths(block, rows, counts)
        for name, place in self.tables.items():
            table = place.view(block)
            table[:] = no_page
            for b, row in enumerate(rows):
                table[b, : len(row.pages[name])] = row.pages[name]
        self._entries = {name: [len(row.pages[name]) for row in rows] for name in self.tables}

    def extend(self, block: npt.NDArray[np.uint8], rows: Sequence[Row]) -> bool:
        """Write pages that were added to the sequences that `fill` was told of last; returns whether there are any."""
        changed = False
        for name, entries in self._entries.items():
            for b, row in enumerate(rows):
                pages = row.pages[name]
                if len(pages) > entries[b]:
                    self.tables[name].view(block)[b, entries[b] : len(pages)] = pages[entries[b] :]
                    entries[b], changed = len(pages), True
        return changed

    def named(self, block: Array) -> dict[str, Array]:
        """Map graph input names to the inputs in a block, on the host or the device."""
        inputs = {
            contract.TOKEN_IDS: self.token_ids.view(block),
            contract.POSITIONS: self.positions.view(block),
            contract.ROPE_VARIANT: self.rope_variant.view(block),
            contract.QUERY_START: self.query_start.view(block),
            contract.PAST_LEN: self.past_len.view(block),
            contract.LOGIT_ROWS: self.logit_rows.view(block),
        }
        inputs |= {contract.kv_len(index): lengths.view(block) for index, lengths in self.kv_len.items()}
        return inputs | {kind.block_table: self.tables[kind.name].view(block) for kind in self._manifest.cache_kinds}

    def _fill_lengths(self, block: npt.NDArray[np.uint8], rows: Sequence[Row], counts: list[int]) -> None:
        past = self.past_len.view(block)
        past[: len(rows)] = [row.logical for row in rows]
        past[len(rows) :] = 0
        used = sum(counts)
        starts = self.query_start.view(block)[: len(rows)]
        self.positions.view(block)[:used] = np.arange(used) + np.repeat(past[: len(rows)] - starts, counts)
        evicted = [(b, row.physical) for b, row in enumerate(rows) if row.physical]
        for index, place in self.kv_len.items():
            lengths = place.view(block)
            lengths[:] = past[:, None]
            for b, physical in evicted:
                lengths[b] = physical[index]

    def _place(self, shape: tuple[int, ...], dtype: str) -> Field:
        place = Field(self._bytes, shape, dtype)
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self._bytes += -(-size // ALIGNMENT) * ALIGNMENT
        return place
