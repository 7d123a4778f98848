"""Drafts with the model's own head for multi-token prediction, applied again to what it made itself."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ortolan.errors import OrtolanError
from ortolan.runtime.device.buffers import Array, Buffers
from ortolan.runtime.generate.draw import Draw
from ortolan.runtime.options import Sampling
from ortolan.runtime.speculation.draft_model import count_common
from ortolan.runtime.steps.feeder import Feeder, Wanted
from ortolan.runtime.steps.row import Row
from ortolan.runtime.steps.stepper import BAD, StepResult

TAIL_ROWS = 128  # hidden states kept of the last tokens: more than are read between two drafts, pauses included
FEW_TOKENS = 16  # in a step whose hidden states wait in the tail for the next draft; those of more are read at once

_log = logging.getLogger(__name__)


class HeadDrafter:
    """A draft head that reads along with its model.

    At position i it reads token i and what the model made of token i - 1. Of a prompt it reads each chunk right behind
    the model; of what is generated it reads, before each draft, what was added. Positions count from where it began to
    read: its caches know nothing of what came before.
    """

    def __init__(self, feeder: Feeder, buffers: Buffers) -> None:
        """Start before the first token.

        Args:
            feeder: of the head, with caches of its own.
            buffers: where arrays live.
        """
        self._feeder = feeder
        self._start = 1  # position of the first token that the head has read
        manifest = feeder.manifest
        self._tail = _Tail(buffers, buffers.empty((TAIL_ROWS, manifest.hidden_size), manifest.dtype))
        self._last = _Last(buffers, buffers.empty((1, manifest.hidden_size), manifest.dtype))
        self._waiting: deque[StepResult] = deque()
        self._failed = False

    def take_hidden(self, row: Row, hidden: Array) -> None:
        """Take what the model made of tokens that it reads now."""
        if self._failed:
            return
        try:
            if len(hidden) > FEW_TOKENS:
                self._read_prompt(row, hidden)
            self._tail.put(row.logical, hidden)
        except OrtolanError as error:
            self._failed = True
            _log.warning("goes on without drafts: %s", error)

    def propose(self, tokens: Sequence[int], count: int, sampling: Sampling) -> list[int]:
        """Return what the head chooses; nothing where the model's hidden states were not taken."""
        begin = self._first_unread(tokens)
        count = min(count, self._feeder.plan.max_context - len(tokens) + self._start)
        if self._failed or begin is None or count < 1:
            return []
        feeder, length = self._feeder, len(tokens)
        draws = [_draw(sampling, length + i, tokens) for i in range(count)]
        feeder.make_room(length - begin + count)
        given = [int(token) for token in tokens[begin:]]
        wanted = (None,) * (len(given) - 1) if len(given) <= FEW_TOKENS else ()
        drafted = [self._choose(given, 0, (*wanted, draws[0]), self._tail.rows(begin - 1, length - 1))]
        feeder.count(given)
        for ahead, draw in enumerate(draws[1:]):
            if drafted[-1] == BAD:
                break
            drafted.append(self._choose(drafted[-1:], ahead, (draw,), self._last.hidden))
        feeder.discard(len(drafted) - 1)
        return [token for token in drafted if token != BAD]

    def is_likely(self, tokens: Sequence[int], known: int) -> bool:
        """Say whether the head's context is long enough."""
        return not self._failed and known - self._start < self._feeder.plan.max_context

    def _choose(self, tokens: list[int], ahead: int, draws: Sequence[Draw | None], hidden: Array) -> int:
        row = self._feeder.row(tokens, ahead, Wanted(draws=draws))
        return self._run(replace(row, hidden=hidden, reader=self._last)).tokens()[-1]

    def _run(self, row: Row) -> StepResult:
        """Run a step of the head; not more are under way than may be."""
        while len(self._waiting) > self._feeder.stepper.depth:
            self._waiting.popleft().tokens()
        result = self._feeder.stepper.run([row])
        self._waiting.append(result)
        return result

    def _read_prompt(self, row: Row, hidden: Array) -> None:
        """Read a chunk right behind the model, and before it what the model read since the last draft."""
        first, feeder = row.logical, self._feeder
        tokens = [*self._known_before(row), *map(int, row.tokens)]
        is_known = len(tokens) == first + len(row.tokens)
        begin = self._first_unread(tokens[: first + 1]) if is_known and first else None
        if begin is None:
            feeder.rewind(0)
            self._start = first + 1
            tokens, given = tokens[1 - len(row.tokens) :], hidden[:-1]
        else:
            tokens, given = tokens[begin:], self._tail.followed_by(hidden[:-1], begin - 1, first)
        if row.source is not None:  # the last token is not known yet
            tokens, given = tokens[:-1], given[:-1]
        if feeder.state.fed + len(tokens) <= feeder.plan.max_context:
            feeder.make_room(len(tokens))
            self._run(replace(feeder.row(tokens, 0, Wanted()), hidden=given))
            feeder.count(tokens)

    def _known_before(self, row: Row) -> list[int]:
        """Return the tokens before a row; its history lacks those of chunks under way, but the head has read them."""
        known = list(row.history[: row.logical])
        missing = slice(len(known) - self._start, row.logical - self._start)
        return known if missing.start < 0 else [*known, *self._feeder.state.history[missing]]

    def _first_unread(self, tokens: Sequence[int]) -> int | None:
        """Forget what the head has read of another sequence, and return the first position to read; None: none can."""
        feeder, last = self._feeder, len(tokens) - 1
        known = count_common(feeder.state.history, tokens[self._start :]) if last >= self._start else 0
        begin = self._start + known
        since = self._tail.since(last)
        if since >= last:
            return None
        if begin <= since:  # what the model made of tokens in between is gone
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

    def has(self, position: int) -> bool:
        """Say whether a position's hidden state is there."""
        return bool(self._positions[position % TAIL_ROWS] == position)

    def since(self, end: int) -> int:
        """Return from where on the hidden states of all positions before `end` are there; `end`: none is."""
        begin = end
        while begin > 0 and end - begin < TAIL_ROWS and self.has(begin - 1):
            begin -= 1
        return begin

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


def _draw(sampling: Sampling, position: int, tokens: Sequence[int]) -> Draw:
    """Say how the token at a position is chosen: as the model will, but for a penalty of what was drafted before it."""
    seen = tokens if sampling.repetition_penalty != 1.0 else ()
    return Draw(sampling=sampling, seed=int(sampling.seed or 0), position=position, seen=seen)
