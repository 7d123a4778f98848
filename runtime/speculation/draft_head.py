"""Drafts with the model's own head for multi-token prediction, applied again to what it made itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ortolan.errors import OrtolanError
from ortolan.runtime.device.buffers import Array, Buffers
from ortolan.runtime.options import Sampling
from ortolan.runtime.speculation.packed import (
    FEW_TOKENS,
    NoDraftRoomError,
    PackedDrafter,
    Place,
    ReadingBudget,
    draws_of,
)
from ortolan.runtime.steps.feeder import Wanted
from ortolan.runtime.steps.row import Row
from ortolan.runtime.steps.together import Ask, Work

TAIL_ROWS = 128  # hidden states kept of the last tokens: more than are read between two drafts, pauses included

_log = logging.getLogger(__name__)


class HeadDrafter(PackedDrafter):
    """A draft head that reads along with its model.

    At position i it reads token i and what the model made of token i - 1. Of a prompt it reads each chunk right behind
    the model; of what is generated it reads, before each draft, what was added. Positions count from where it began to
    read: its caches know nothing of what came before.
    """

    def __init__(self, place: Place, cost: float) -> None:
        """Start before the first token."""
        super().__init__(place, cost)
        self._start = 1  # position of the first token that the head has read
        feeder = place.feeder
        manifest, buffers = feeder.manifest, feeder.caches.buffers
        self._tail = _Tail(buffers, buffers.empty((TAIL_ROWS, manifest.hidden_size), manifest.dtype))
        self._last = _Last(buffers, buffers.empty((1, manifest.hidden_size), manifest.dtype))
        self._failed = False

    @property
    def bytes(self) -> int:
        """Bytes of its caches, of hidden states that it keeps, and of the steps' inputs and outputs."""
        return super().bytes + self._tail.bytes + int(self._last.hidden.nbytes)

    def take_hidden(self, row: Row, hidden: Array) -> Work[None] | None:
        """Take what the model made of tokens that it reads now."""
        if self._failed:
            return None
        if len(hidden) > FEW_TOKENS:
            return self._read_prompt(row, hidden)
        self._tail.put(row.logical, hidden)
        return None

    def drafting(self, tokens: Sequence[int], count: int, sampling: Sampling, budget: ReadingBudget) -> Work[list[int]]:
        """Draft what the head chooses; nothing where the model's hidden states were not taken."""
        feeder, length = self._feeder, len(tokens)
        begin = self._first_unread(length - 1)
        count = min(count, feeder.plan.max_context - length + self._start)
        if self._failed or begin is None or count < 1:
            return []
        self._make_room(length - begin + count)
        budget.grant(length - begin)
        given = [int(token) for token in tokens[begin:]]
        known = self._tail.rows(begin - 1, length - 1)
        try:
            return (
                yield from self._draft(
                    given,
                    draws_of(sampling, tokens, count),
                    lambda row: replace(row, hidden=known, reader=self._last),
                    lambda row: replace(row, hidden=self._last.hidden, reader=self._last),
                )
            )
        except OrtolanError:
            feeder.rewind(0)
            raise

    def is_likely(self, tokens: Sequence[int], known: int) -> bool:
        """Say whether the head's context is long enough."""
        return not self._failed and known - self._start < self._feeder.plan.max_context

    def forget(self, length: int) -> None:
        """Forget what was read from that position on."""
        known = max(0, length - self._start)
        if known < self._feeder.state.fed:
            self._feeder.rewind(known)
        self._tail.forget(length)

    def _read_prompt(self, row: Row, hidden: Array) -> Work[None]:
        """Read a chunk right behind the model, and before it what the model read since the last draft."""
        try:
            yield from self._read_behind(row, hidden)
            self._tail.put(row.logical, hidden)
        except NoDraftRoomError:  # what is kept of the last tokens is enough to begin anew
            self._tail.put(row.logical, hidden)
        except OrtolanError as error:
            self._failed = True
            _log.warning("goes on without drafts: %s", error)

    def _read_behind(self, row: Row, hidden: Array) -> Work[None]:
        first, feeder = row.logical, self._feeder
        begin = self._first_unread(first) if first else None
        if begin is not None and begin < first and len(row.history) < first:
            begin = None  # tokens between are not known
        tokens = [int(token) for token in row.tokens]
        if begin is None:
            feeder.rewind(0)
            self._start = first + 1
            tokens, given = tokens[1:], hidden[:-1]
        else:
            tokens = [*map(int, row.history[begin:first]), *tokens]
            given = self._tail.followed_by(hidden[:-1], begin - 1, first)
        if row.source is not None:  # the last token is not known yet
            tokens, given = tokens[:-1], given[:-1]
        if tokens and feeder.state.fed + len(tokens) <= feeder.plan.max_context:
            self._make_room(len(tokens))
            feeder.discard(len(tokens))
            yield Ask(self._packing, replace(feeder.row(tokens, 0, Wanted()), hidden=given))
            feeder.count(tokens)

    def _first_unread(self, last: int) -> int | None:
        """Return the first position to read up to the last one, and forget what was read from there on; None: none."""
        feeder = self._feeder
        known = max(0, min(feeder.state.fed, last - self._start))
        begin, since = self._start + known, self._tail.since(last)
        if since >= last:
            return None
        if begin <= since or self._start > last:  # what the model made of tokens in between is gone
            known, self._start, begin = 0, since + 1, since + 1
        if known < feeder.state.fed:
            feeder.rewind(known)
        return begin


class _Tail:
    """Hidden states of the last positions of a sequence, each in the row of its remainder."""

    def __init__(self, buffers: Buffers, array: Array) -> None:
        self._buffers, self._array = buffers, array
        self._positions = np.full(len(array), -1)

    def put(self, first: int, hidden: Array) -> None:
        """Keep the last of the hidden states of consecutive positions from `first` on."""
        count = min(len(hidden), TAIL_ROWS)
        begin = first + len(hidden) - count
        rows = np.arange(begin, begin + count)
        with self._buffers.scope():
            for begin_row, end_row, source in _pieces(begin, count):
                self._array[begin_row:end_row] = hidden[len(hidden) - count + source :][: end_row - begin_row]
        self._positions[rows % TAIL_ROWS] = rows

    @property
    def bytes(self) -> int:
        """Bytes of the rows."""
        return int(self._array.nbytes)

    def forget(self, length: int) -> None:
        """Forget the hidden states of positions from that one on."""
        self._positions[self._positions >= length] = -1

    def since(self, end: int) -> int:
        """Return from where on the hidden states of all positions before `end` are there; `end`: none is."""
        positions = np.arange(end - 1, max(0, end - TAIL_ROWS) - 1, -1)
        lacking = np.flatnonzero(self._positions[positions % TAIL_ROWS] != positions)
        return end - (int(lacking[0]) if len(lacking) else len(positions))

    def rows(self, begin: int, end: int) -> Array:
        """Copy the hidden states of a range of positions, [end - begin, features]."""
        result = self._buffers.allocate((end - begin, self._array.shape[1]), self._array.dtype)
        with self._buffers.scope():
            for begin_row, end_row, place in _pieces(begin, end - begin):
                result[place : place + end_row - begin_row] = self._array[begin_row:end_row]
        return result

    def followed_by(self, hidden: Array, begin: int, end: int) -> Array:
        """Copy the hidden states of a range of positions, and others behind them."""
        count = end - begin
        result = self._buffers.allocate((count + len(hidden), self._array.shape[1]), self._array.dtype)
        with self._buffers.scope():
            result[:count] = self.rows(begin, end)
            result[count:] = hidden
        return result


class _Last:
    """The hidden state that the head's last step made of its last token, [1, features]."""

    def __init__(self, buffers: Buffers, array: Array) -> None:
        self._buffers, self.hidden = buffers, array

    def take_hidden(self, row: Row, hidden: Array) -> None:
        """Take the last one."""
        with self._buffers.scope():
            self.hidden[:] = hidden[-1:]


def _pieces(begin: int, count: int) -> list[tuple[int, int, int]]:
    """Part consecutive positions where the tail's rows wrap: first row, end, and place among the positions."""
    row = begin % TAIL_ROWS
    first = min(count, TAIL_ROWS - row)
    pieces = [(row, row + first, 0), (0, count - first, first)]
    return [piece for piece in pieces if piece[1] > piece[0]]
