"""Continues one sequence token by token; on a device, steps are under way past the last token that was taken."""

from __future__ import annotations

import time
from collections import deque

from ortolan.errors import OrtolanError
from ortolan.runtime.generate.logprobs import TokenLogprobs
from ortolan.runtime.generate.turn import Turn
from ortolan.runtime.steps.feeder import Feeder, Wanted
from ortolan.runtime.steps.reader import Reader
from ortolan.runtime.steps.stepper import BAD, StepResult

Chosen = tuple[int, TokenLogprobs | None]


class Chain:
    """The steps of a generation: each feeds the token that the one before it chose.

    Attributes:
        state: of the sequence.
        max_context: its longest length.
    """

    def __init__(self, feeder: Feeder, reader: Reader) -> None:
        self._feeder, self._reader = feeder, reader
        self.state, self.max_context, self._stats = feeder.state, feeder.plan.max_context, feeder.stats
        self._waiting: deque[StepResult] = deque()  # steps under way, whose tokens were not taken yet

    @property
    def steps_ahead(self) -> int:
        """Steps under way."""
        return len(self._waiting)

    def wanted(self, turn: Turn, position: int) -> Wanted:
        """Say how the token at a position is chosen, from the logits of the one before it."""
        seen = self.state.tokens if turn.sampling.repetition_penalty != 1.0 else ()
        return Wanted(draws=(turn.draw(position, seen),), logprobs=turn.logprobs)

    def settle(self) -> None:
        """End the chain; steps past the last token count as written, not as read."""
        self._feeder.discard(len(self._waiting))
        self._waiting.clear()

    def next(self, turn: Turn) -> Chosen:
        """Feed the token that waits, where no step under way does, and return the one after it."""
        self._feeder.interrupt.check()
        if not self._waiting:
            result = self._reader.decode_pending(self.wanted(turn, len(self.state.tokens)))
        else:
            result = self._take()
        return result.tokens()[0], result.logprobs()[0]

    def fill(self, turn: Turn) -> None:
        """Enqueue the steps that lead to the tokens to come, as far as nothing else must happen before them."""
        feeder, stepper, pending = self._feeder, self._feeder.stepper, self.state.pending
        if len(pending) != 1:
            return  # more are left of a prompt that was saved while it was read
        while stepper.depth and len(self._waiting) <= stepper.depth:
            ahead = len(self._waiting)
            if turn.count + ahead >= turn.max_new_tokens or not self._reader.can_go_on(ahead):
                return
            wanted = self.wanted(turn, len(self.state.tokens) + ahead)
            row = feeder.row(pending, ahead, wanted, 0 if ahead else None)
            if not stepper.is_ready(row):
                return  # the token that is there does not wait for the capture
            try:
                self._waiting.append(stepper.run([row]))
            except BaseException:  # the step may be written, and what it chose is not known to one behind it
                feeder.discard(1 + ahead)
                self._waiting.clear()
                raise

    def _take(self) -> StepResult:
        """Wait for the oldest step under way; the token that it fed is read then."""
        start, result = time.perf_counter(), self._waiting[0]
        try:
            if result.tokens()[0] == BAD:
                raise self._feeder.numeric_error(1)
        except OrtolanError:
            self.settle()
            raise
        self._feeder.count(self.state.pending)
        self._waiting.popleft()  # an interrupt before it leaves no token to feed, and is noticed; not so the other way
        device_seconds = result.device_seconds or 0.0
        self._stats.decode_tokens += 1
        self._stats.decode_device_seconds += device_seconds
        self._stats.decode_seconds += max(device_seconds, time.perf_counter() - start)
        return result
