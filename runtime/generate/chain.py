"""Continues one sequence token by token, or by drafts; on a device, steps are under way past the last token taken."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ortolan.errors import OrtolanError
from ortolan.runtime.generate.logprobs import TokenLogprobs
from ortolan.runtime.generate.turn import Turn
from ortolan.runtime.ownership import Use
from ortolan.runtime.speculation.drafter import Speculator, count_accepted
from ortolan.runtime.speculation.options import MOST_DRAFTED
from ortolan.runtime.steps.feeder import Feeder, Wanted
from ortolan.runtime.steps.reader import Reader
from ortolan.runtime.steps.stepper import BAD, StepResult

Chosen = tuple[int, TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class Check:
    """A step under way that feeds a token and a draft behind it; it writes tokens up to the logical length `end`."""

    draft: list[int]
    end: int
    result: StepResult


class Chain:
    """The steps of a generation: each feeds the token that the one before it chose.

    Attributes:
        state: of the sequence.
        max_context: its longest length.
        use: of it, by one call at a time.
        speculator: drafts for the generation under way; None: nobody does.
    """

    def __init__(self, feeder: Feeder, reader: Reader) -> None:
        self._feeder, self._reader = feeder, reader
        self.state, self.max_context, self._stats = feeder.state, feeder.plan.max_context, feeder.stats
        self.use = Use()
        self.speculator: Speculator | None = None
        self._waiting: deque[StepResult] = deque()  # steps under way, whose tokens were not taken yet
        self._checked: deque[Chosen] = deque()  # what follows the token that waits: both were right in a draft
        self._check: Check | None = None  # behind all of these

    @property
    def tokens_ahead(self) -> int:
        """Tokens that steps under way write past those read."""
        return len(self._waiting) if self._check is None else self._check.end - self.state.fed

    def wanted(self, turn: Turn, ahead: int = 0, draft: Sequence[int] = ()) -> Wanted:
        """Say how the token behind so many steps ahead is chosen, and those behind each token of a draft."""
        tokens = self.state.tokens
        return Wanted(draws=turn.draws(tokens, len(tokens) + ahead, draft), logprobs=turn.logprobs)

    def settle(self) -> None:
        """End the chain; steps past the last token count as written, not as read."""
        self._feeder.discard(self.tokens_ahead)
        self._waiting.clear()
        self._checked.clear()
        self._check = None

    def next(self, turn: Turn) -> Chosen:
        """Feed the token that waits, where no step under way or past does, and return the one after it."""
        self._feeder.interrupt.check()
        if self._checked:
            self._feeder.count(self.state.pending)
            self._stats.decode_tokens += 1
            return self._checked.popleft()
        if self._waiting:
            result = self._take()
        elif self._check is not None or self._start_check(turn):
            return self._take_check()
        else:
            result = self._reader.decode_pending(self.wanted(turn))
        if self.speculator is not None:
            self.speculator.skip()
        return result.tokens()[0], result.logprobs()[0]

    def fill(self, turn: Turn) -> None:
        """Enqueue the steps that lead to the tokens to come, as far as nothing else must happen before them."""
        feeder, stepper, pending = self._feeder, self._feeder.stepper, self.state.pending
        if len(pending) != 1:
            return  # more are left of a prompt that was saved while it was read
        if self._check is not None:
            return
        if self._checked or self._may_draft():
            if stepper.depth and not self._waiting:
                self._start_check(turn, is_early=True)
            return
        while stepper.depth and len(self._waiting) <= stepper.depth:
            ahead = len(self._waiting)
            if turn.count + ahead >= turn.max_new_tokens or not self._reader.can_go_on(ahead):
                return
            wanted = self.wanted(turn, ahead)
            row = feeder.row(pending, ahead, wanted, 0 if ahead else None)
            if not stepper.is_ready(row):
                return  # the token that is there does not wait for the capture
            try:
                self._waiting.append(stepper.run([row]))
            except BaseException:  # the step may be written, and what it chose is not known to one behind it
                feeder.discard(1 + ahead)
                self._waiting.clear()
                raise

    def _may_draft(self) -> bool:
        tokens = self.state.tokens
        return self.speculator is not None and self.speculator.wants_to_draft(tokens, len(tokens))

    def _start_check(self, turn: Turn, *, is_early: bool = False) -> bool:
        """Enqueue the check of a draft behind the token that waits and those known to follow; returns whether it did.

        Args:
            turn: the generation.
            is_early: whether tokens are there that do not wait for a graph to be captured.
        """
        if self.speculator is None or len(self.state.pending) != 1:
            return False
        tokens, checked = self.state.tokens, [token for token, _ in self._checked]
        known, ahead = len(tokens), len(checked)
        try:
            tokens.extend(checked)  # until the draft is made: a copy of a long sequence would keep the device waiting
            draft = self._draft(turn, tokens)
            if not draft:
                return False
            wanted = self.wanted(turn, draft=draft)
        finally:
            del tokens[known:]
        given = np.array([*checked, *draft], np.int64)
        row = self._feeder.row(self._reader.with_pending(given)[ahead:], ahead, wanted)
        if is_early and not self._feeder.stepper.is_ready(row):
            return False
        start, captured = time.perf_counter(), self._stats.graph_capture_seconds
        try:
            end = self.state.fed + ahead + len(row.tokens)
            result = self._feeder.stepper.run([row]) if is_early else self._feeder.run(row)
            self._check = Check(draft, end, result)
        except BaseException:  # the step may be written, and what it chose is not known to one behind it
            self._feeder.discard(ahead + len(row.tokens))
            self._check = None
            raise
        self._stats.decode_seconds += time.perf_counter() - start - (self._stats.graph_capture_seconds - captured)
        return True

    def _draft(self, turn: Turn, tokens: Sequence[int]) -> list[int]:
        """Return a draft that a step may read behind all tokens that are known; empty: none."""
        speculator, ahead = self.speculator, len(self._checked)
        assert speculator is not None
        most = min(MOST_DRAFTED, self._feeder.plan.chunk_size - 1, turn.max_new_tokens - turn.count - 1) - ahead
        while most > 0 and not self._reader.can_go_on(ahead + most):
            most -= 1
        if most < 1:
            return []
        start = time.perf_counter()
        draft = speculator.draft(tokens, most, turn.sampling)
        self._stats.decode_seconds += time.perf_counter() - start
        return draft

    def _take_check(self) -> Chosen:
        """Wait for a check; returns the token after the one that it fed, and keeps those after the right ones."""
        check = self._check
        assert check is not None
        assert self.speculator is not None
        start = time.perf_counter()
        try:
            tokens = check.result.tokens()
            if tokens[0] == BAD:
                raise self._feeder.numeric_error(1)
        except OrtolanError:
            self.settle()
            raise
        draft = check.draft
        self._feeder.count(self.state.pending)
        self._feeder.discard(len(draft))
        self._check = None  # an interrupt before it leaves no token to feed, and is noticed; not so the other way
        self._stats.decode_seconds += time.perf_counter() - start
        self._stats.decode_device_seconds += check.result.device_seconds or 0.0
        accepted = count_accepted(draft, tokens)
        self.speculator.note(len(draft), accepted)
        self._stats.decode_tokens += 1
        self._stats.drafted_tokens += len(draft)
        self._stats.accepted_tokens += accepted
        self._stats.draft_checks += 1
        chosen = list(zip(tokens, check.result.logprobs(), strict=True))[: accepted + 1]
        if chosen[-1][0] == BAD:  # the step that feeds the token before it will say so
            del chosen[-1]
        self._checked.extend(chosen[1:])
        return chosen[0]

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
