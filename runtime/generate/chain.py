"""Continues one sequence token by token, or by drafts; on a device, steps are under way past the last token taken."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

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

    @property
    def steps_ahead(self) -> int:
        """Steps under way."""
        return len(self._waiting)

    def wanted(self, turn: Turn, position: int, draft: Sequence[int] = ()) -> Wanted:
        """Say how the token at a position is chosen, from the logits of the one before it, and those after a draft."""
        seen = [*self.state.tokens, *draft] if turn.sampling.repetition_penalty != 1.0 else []
        known = len(seen) - len(draft)
        draws = [turn.draw(position + i, seen[: known + i]) for i in range(1 + len(draft))]
        return Wanted(draws=draws, logprobs=turn.logprobs)

    def settle(self) -> None:
        """End the chain; steps past the last token count as written, not as read."""
        self._feeder.discard(len(self._waiting))
        self._waiting.clear()
        self._checked.clear()

    def next(self, turn: Turn) -> Chosen:
        """Feed the token that waits, where no step under way or past does, and return the one after it."""
        self._feeder.interrupt.check()
        if self._checked:
            self._feeder.count(self.state.pending)
            self._stats.decode_tokens += 1
            return self._checked.popleft()
        if self._waiting:
            result = self._take()
        else:
            draft = self._draft(turn)
            if draft:
                return self._check(turn, draft)
            result = self._reader.decode_pending(self.wanted(turn, len(self.state.tokens)))
        if self.speculator is not None:
            self.speculator.skip()
        return result.tokens()[0], result.logprobs()[0]

    def fill(self, turn: Turn) -> None:
        """Enqueue the steps that lead to the tokens to come, as far as nothing else must happen before them."""
        feeder, stepper, pending = self._feeder, self._feeder.stepper, self.state.pending
        if len(pending) != 1:
            return  # more are left of a prompt that was saved while it was read
        if self._checked or self._may_draft():
            return
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

    def _may_draft(self) -> bool:
        tokens = self.state.tokens
        return self.speculator is not None and self.speculator.wants_to_draft(tokens, len(tokens))

    def _draft(self, turn: Turn) -> list[int]:
        """Return a draft that a step may read behind the token that waits; empty: none."""
        speculator, tokens = self.speculator, self.state.tokens
        if speculator is None or len(self.state.pending) != 1:
            return []
        most = min(MOST_DRAFTED, turn.max_new_tokens - turn.count - 1, self._feeder.plan.chunk_size - 1)
        while most > 0 and not self._reader.can_go_on(most):
            most -= 1
        if most < 1:
            return []
        start = time.perf_counter()
        draft = speculator.draft(tokens, most, turn.sampling)
        self._stats.decode_seconds += time.perf_counter() - start
        return draft

    def _check(self, turn: Turn, draft: list[int]) -> Chosen:
        """Check a draft; returns the token after the one that waited, and keeps those after the right ones."""
        wanted = self.wanted(turn, len(self.state.tokens), draft)
        result = self._reader.check_draft(draft, wanted)
        tokens = result.tokens()
        accepted = count_accepted(draft, tokens)
        assert self.speculator is not None
        self.speculator.note(len(draft), accepted)
        self._stats.drafted_tokens += len(draft)
        self._stats.accepted_tokens += accepted
        self._stats.draft_checks += 1
        chosen = list(zip(tokens, result.logprobs(), strict=True))[: accepted + 1]
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
