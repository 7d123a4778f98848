"""Runs what several sequences want fed in common steps, round by round, until each has what it wanted."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from ortolan.errors import OrtolanError
from ortolan.runtime.device.buffers import Array
from ortolan.runtime.steps.row import Row
from ortolan.runtime.steps.stepper import Stepper, StepResult

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step chose for one of its rows.

    Attributes:
        result: of the step.
        logit_row: the last one of the row.
    """

    result: StepResult
    logit_row: int

    def token(self) -> int:
        """Wait, and return the token after the row; `BAD` where its logits hold NaN or infinity."""
        return self.result.tokens()[self.logit_row]


@dataclass(frozen=True, slots=True)
class Ask:
    """A row to feed.

    Attributes:
        packing: runs it, together with all others that ask the same one.
        row: of the sequence.
        follows: the choice that is the row's only token, whatever its `tokens` say; None: they are known.
    """

    packing: Packing
    row: Row
    follows: Taken | None = None


Work: TypeAlias = Generator[Ask, Taken, T]  # asks for one row after another, and returns what came of it


class Packing:
    """A stepper whose steps are shared by all that ask it."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self._waiting: deque[StepResult] = deque()
        self._last: StepResult | None = None  # whose choices are on the device

    def run(self, asks: Sequence[Ask]) -> list[Taken]:
        """Run one step; not more are under way than may be. Raises OrtolanError."""
        while len(self._waiting) > self.stepper.depth:
            self._waiting.popleft().tokens()
        rows = [self._row(ask) for ask in asks]
        self._last = None  # until the step is enqueued
        self._last = result = self.stepper.run(rows)
        self._waiting.append(result)
        taken, end = [], 0
        for row in rows:
            end += len(row.draws)
            taken.append(Taken(result, end - 1))
        return taken

    def _row(self, ask: Ask) -> Row:
        """Take a token from the device where the step before has chosen it and the host need not know."""
        if ask.follows is None:
            return ask.row
        if self.stepper.depth and self._last is ask.follows.result:
            return replace(ask.row, source=ask.follows.logit_row)
        return replace(ask.row, tokens=[max(0, ask.follows.token())])


def run_together(works: Sequence[Work[T]]) -> list[T | OrtolanError]:
    """Run works round by round: in each, rows that ask the same packing share a step.

    Where a step of several rows fails, each is run alone, so that only those at fault fail.

    Returns:
        What each work returned, or the error that ended it.
    """
    ended: dict[int, T | OrtolanError] = {}
    asks = {index: ask for index, work in enumerate(works) if (ask := _advance(work, None, ended, index)) is not None}
    while asks:
        groups: dict[Packing, list[int]] = {}
        for index, ask in asks.items():
            groups.setdefault(ask.packing, []).append(index)
        answers = {
            index: answer
            for packing, members in groups.items()
            for index, answer in zip(members, _run(packing, [asks[index] for index in members]), strict=True)
        }
        asks = {
            index: ask
            for index, answer in sorted(answers.items())
            if (ask := _advance(works[index], answer, ended, index)) is not None
        }
    return [ended[index] for index in range(len(works))]


def hand_on_hidden(rows: Sequence[Row], hidden: Array | None) -> None:
    """Hand the hidden states [T, features] of a step to the rows' readers, and run what they want to feed of it."""
    works, begin = [], 0
    for row in rows:
        end = begin + len(row.tokens)
        if row.reader is not None and hidden is not None:
            work = row.reader.take_hidden(row, hidden[begin:end])
            if work is not None:
                works.append(work)
        begin = end
    run_together(works)


def _run(packing: Packing, asks: Sequence[Ask]) -> list[Taken | OrtolanError]:
    try:
        return list(packing.run(asks))
    except OrtolanError as error:
        if len(asks) == 1:
            return [error]
        return [answer for ask in asks for answer in _run(packing, [ask])]


def _advance(
    work: Work[T], answer: Taken | OrtolanError | None, ended: dict[int, T | OrtolanError], index: int
) -> Ask | None:
    """Let a work go on; None: it has ended, and what came of it is noted."""
    try:
        if isinstance(answer, OrtolanError):
            return work.throw(answer)
        return next(work) if answer is None else work.send(answer)
    except StopIteration as stop:
        ended[index] = stop.value
    except OrtolanError as error:
        ended[index] = error
    return None
