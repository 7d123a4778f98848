"""Lays the inputs of a step out in one block of memory, so that one copy brings them to a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan import contract
from ortolan.errors import ConfigError
from ortolan.manifest import Manifest
from ortolan.runtime.device.buffers import Array
from ortolan.runtime.steps.row import Row

ALIGNMENT = 256  # bytes, of each input

TokenIds = Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Field:
    """One input's place in the block."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    def view(self, block: Array) -> Array:
        """View the input in a block of bytes, on the host or the device."""
        size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return block[self.offset : self.offset + size].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """How large a step is.

    Attributes:
        tokens: T.
        sequences: B.
        logit_rows: R.
        columns: of each cache kind's block table, by name.
    """

    tokens: int
    sequences: int
    logit_rows: int
    columns: tuple[tuple[str, int], ...] = ()


class HostInputs:
    """The inputs of a step in a host block, as views that are made once for many steps."""

    def __init__(self, layout: StepLayout, block: npt.NDArray[np.uint8]) -> None:
        """View a block of `layout.bytes` bytes."""
        self.token_ids, self.positions = layout.token_ids.view(block), layout.positions.view(block)
        self.rope_variant, self.logit_rows = layout.rope_variant.view(block), layout.logit_rows.view(block)
        self.query_start, self.past_len = layout.query_start.view(block), layout.past_len.view(block)
        self.all_kv_len = block[layout.kv_begin : layout.tables_begin].view(np.int32)
        self.kv_len = {index: place.view(block) for index, place in layout.kv_len.items()}
        self.tables = {name: place.view(block) for name, place in layout.tables.items()}
        self._entries: dict[str, list[int]] = {}  # of each row of the tables

    def fill(self, rows: Sequence[Row], no_page: int) -> None:
        """Write the inputs of a step; `no_page` stands in tables past the pages in use."""
        self._fill_tokens(rows)
        self._fill_lengths(rows)
        for name, table in self.tables.items():
            table[:] = no_page
            for b, row in enumerate(rows):
                table[b, : len(row.pages[name])] = row.pages[name]
        self._entries = {name: [len(row.pages[name]) for row in rows] for name in self.tables}

    def extend(self, rows: Sequence[Row]) -> bool:
        """Write pages that were added to the sequences that `fill` was told of last; returns whether there are any."""
        changed = False
        for name, entries in self._entries.items():
            for b, row in enumerate(rows):
                pages = row.pages[name]
                if len(pages) > entries[b]:
                    self.tables[name][b, entries[b] : len(pages)] = pages[entries[b] :]
                    entries[b], changed = len(pages), True
        return changed

    def _fill_tokens(self, rows: Sequence[Row]) -> None:
        begin = chosen = 0
        for b, row in enumerate(rows):
            count, draws = len(row.tokens), len(row.draws)
            end = begin + count
            self.query_start[b] = begin
            self.token_ids[begin:end] = row.tokens
            self.positions[begin:end] = np.arange(row.logical, row.logical + count)
            self.rope_variant[begin:end] = row.variant
            self.logit_rows[chosen : chosen + draws] = np.arange(end - draws, end)
            begin, chosen = end, chosen + draws
        self.query_start[len(rows) :] = begin
        if begin < len(self.token_ids):
            self.token_ids[begin:] = self.positions[begin:] = self.rope_variant[begin:] = 0
        if chosen < len(self.logit_rows):
            self.logit_rows[chosen:] = 0

    def _fill_lengths(self, rows: Sequence[Row]) -> None:
        past = self.past_len
        past[: len(rows)] = [row.logical for row in rows]
        past[len(rows) :] = 0
        if len(rows) == len(past) == 1 and not rows[0].physical:
            self.all_kv_len[:] = past[0]
            return
        evicted = [(b, row.physical) for b, row in enumerate(rows) if row.physical]
        for index, lengths in self.kv_len.items():
            lengths[:] = past[:, None]
            for b, physical in evicted:
                lengths[b] = physical[index]


class StepLayout:
    """Places the inputs of a step.

    A step on CUDA may have fewer tokens, sequences and logit rows than were placed: the sequences left over have no
    tokens, the rows past the last token belong to nobody, and the logit rows left over repeat row 0. Physical lengths
    are followed by block tables, which come last, so that each is one range.
    """

    def __init__(self, manifest: Manifest, shape: StepShape) -> None:
        """Place the inputs."""
        self.shape = shape
        self._manifest = manifest
        self._bytes = 0
        columns, sequences = dict(shape.columns), shape.sequences
        heads = {i: layer.num_kv_heads for i, layer in enumerate(manifest.layers) if layer.evictable}
        self.token_ids = self._place((shape.tokens,), "int64")
        self.positions = self._place((shape.tokens,), "int64")
        self.rope_variant = self._place((shape.tokens,), "int64")
        self.logit_rows = self._place((shape.logit_rows,), "int64")
        self.query_start = self._place((sequences + 1,), "int32")
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

    def named(self, block: Array) -> dict[str, Array]:
        """Map graph input names to the inputs in a block, on the host or the device."""
        inputs = {
            contract.TOKEN_IDS: self.token_ids.view(block),
            contract.POSITIONS: self.positions.view(block),
            contract.ROPE_VARIANT: self.rope_variant.view(block),
            contract.LOGIT_ROWS: self.logit_rows.view(block),
            contract.QUERY_START: self.query_start.view(block),
            contract.PAST_LEN: self.past_len.view(block),
        }
        inputs |= {contract.kv_len(index): lengths.view(block) for index, lengths in self.kv_len.items()}
        return inputs | {kind.block_table: self.tables[kind.name].view(block) for kind in self._manifest.cache_kinds}

    def _place(self, shape: tuple[int, ...], dtype: str) -> Field:
        place = Field(self._bytes, shape, dtype)
        size = math.prod(shape) * np.dtype(dtype).itemsize
        self._bytes += -(-size // ALIGNMENT) * ALIGNMENT
        return place


def check_token_ids(token_ids: TokenIds, vocab_size: int) -> npt.NDArray[np.int64]:
    """Return token ids as int64 [T].

    Raises:
        ConfigError: not a list of integers, an empty one, or an id outside the vocabulary.
    """
    if isinstance(token_ids, str):
        raise ConfigError(
            "token_ids is a text; encode it first: model.tokenizer.encode(text) returns the ids that are expected here"
        )
    try:
        given = np.asarray(token_ids)
    except ValueError as error:
        raise ConfigError(f"token_ids is not a list of integers: {error}") from error
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
        raise ConfigError(
            f"token_ids has shape {list(given.shape)} and type {given.dtype}; "
            "expected at least one integer in one dimension"
        )
    if given.min() < 0 or given.max() >= vocab_size:
        raise ConfigError(
            f"invalid token ids: they lie in {int(given.min())} .. {int(given.max())}, and must lie in "
            f"0 .. {vocab_size - 1}"
        )
    return given.astype(np.int64)
