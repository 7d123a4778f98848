"""Reads prompts and tokens of one sequence: with room, evictions between chunks, and the right variant of RoPE."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np

from ortolan.errors import CapacityError, ContextLengthError
from ortolan.runtime.caches.plan import context_advice, rope_variant
from ortolan.runtime.eviction.evicting import Evicting
from ortolan.runtime.generate.logprobs import TokenLogprobs
from ortolan.runtime.steps.feeder import NOTHING, Feeder, Tokens, Wanted
from ortolan.runtime.steps.kept_result import KeptResult
from ortolan.runtime.steps.stepper import StepResult

SCORED_ROWS = 256  # tokens of a chunk whose logits are all computed
NO_TOKENS: Tokens = np.empty(0, np.int64)


class Reader:
    """Reads what a session is given."""

    def __init__(self, feeder: Feeder, evicting: Evicting) -> None:
        self._feeder, self._evicting = feeder, evicting
        self._state, self._plan, self._stats = feeder.state, feeder.plan, feeder.stats
        self._rope_limits = feeder.manifest.rope_limits

    def with_pending(self, given: Tokens) -> Tokens:
        """Put the token that waits to be fed before the given ones, and check that there is room for all.

        Raises:
            ContextLengthError: the sequence would be too long.
            CapacityError: what the tokens look back on is gone.
        """
        tokens = np.concatenate([np.array(self._state.pending, np.int64), given])
        after = self._state.fed + len(tokens)
        if after > self._plan.max_context:
            raise ContextLengthError(
                f"{len(tokens)} more tokens make {after}, past max_context = {self._plan.max_context} "
                f"({self._state.fed} are read); {context_advice(self._plan.max_context, self._feeder.manifest)}"
            )
        self.check_whole()
        return tokens

    def check_whole(self) -> None:
        """Raise CapacityError where what the next token looks back on is gone."""
        lengths = self._state.lengths
        # Rings have room for a chunk behind a window, so that as many tokens may have been written and not read.
        reached = lengths.highest - self._plan.chunk_size
        if max(reached, lengths.rings_from, lengths.states_from) > lengths.logical and self._feeder.rewind_problem(
            lengths.logical
        ):
            raise CapacityError(
                "a failed step overwrote what the next one needs; call rewind(0) and read the sequence again"
            )

    def read_prompt(
        self, tokens: Tokens, progress: Callable[[int], object] | None, wanted: Wanted = NOTHING
    ) -> StepResult:
        """Read a prompt, or the next turn, and evict afterwards where that is due; returns the last chunk's result."""
        first = len(tokens) if self._plan.bound is None else min(len(tokens), self._plan.chunk_size)
        with self._ending_at_what_was_read():
            self._evicting.check_room(first)
            self._evicting.free_room(first)
            self._evicting.prepare_capture(first)
            start, evicting = time.perf_counter(), self._stats.eviction_seconds
            result = self._feed(tokens, progress, wanted)
        self._stats.prefill_seconds += time.perf_counter() - start - (self._stats.eviction_seconds - evicting)
        self._stats.prefill_tokens += len(tokens)
        if self._evicting.reads_again:
            result = KeptResult.copy_of(result)
        self._evicting.evict_if_due()
        return result

    def score(self, tokens: Tokens, best: int, progress: Callable[[int], object] | None) -> list[TokenLogprobs]:
        """Read tokens, and return how likely each but the first was, with the `best` most likely ones."""
        result: list[TokenLogprobs] = []
        for begin, end in self._plan.cuts.pieces(len(tokens), min(self._plan.chunk_size, SCORED_ROWS)):
            step = self.read_prompt(tokens[begin:end], progress, Wanted(draws=(None,) * (end - begin)))
            result += step.score(tokens[begin + 1 : end + 1].tolist(), best)
        return result

    def decode(self, tokens: Tokens) -> StepResult:
        """Feed few tokens that a caller gave, and count them as decoded."""
        with self._ending_at_what_was_read():
            return self._decode(tokens, NOTHING)

    def decode_pending(self, wanted: Wanted) -> StepResult:
        """Feed the token that waits, and count it as decoded; where that fails, it still waits."""
        return self._decode(self.with_pending(NO_TOKENS), wanted)

    def can_go_on(self, ahead: int) -> bool:
        """Say whether a step can feed one more token after `ahead` under way: nothing else must happen before it."""
        length = self._state.fed + ahead + 1
        if length > min(self._plan.max_context, self._rope_limits[self._state.variant]):
            return False
        if self._feeder.rooms() > ahead:
            return True
        if not self._feeder.room.is_cheap or self._plan.bound is not None:
            return False
        self._feeder.make_room(ahead + 1)
        return self._feeder.rooms() > ahead

    def _decode(self, tokens: Tokens, wanted: Wanted) -> StepResult:
        start, captured = time.perf_counter(), self._stats.graph_capture_seconds
        result = self._feed(tokens, None, wanted)
        self._stats.decode_seconds += time.perf_counter() - start - (self._stats.graph_capture_seconds - captured)
        self._stats.decode_tokens += len(tokens)
        return result

    def _feed(self, tokens: Tokens, progress: Callable[[int], object] | None, wanted: Wanted) -> StepResult:
        variant = rope_variant(self._rope_limits, self._state.fed + len(tokens))
        if variant != self._state.variant:
            return self._restart(tokens, variant, progress, wanted)
        return self._read_on(tokens, progress, wanted)

    def _read_on(self, tokens: Tokens, progress: Callable[[int], object] | None, wanted: Wanted) -> StepResult:
        """Read tokens behind those read so far; caches get room for them."""
        note = progress or _take_no_note
        if self._plan.bound is not None:
            return self._read_bounded(tokens, note, wanted)
        self._feeder.make_room(len(tokens))
        bind = self._evicting.binding_ahead(len(tokens))
        return self._feeder.feed(tokens, note, wanted, bind)

    def _read_bounded(self, tokens: Tokens, note: Callable[[int], object], wanted: Wanted) -> StepResult:
        """Read tokens, and evict between chunks, so that caches of a planned size hold them."""
        chunks = list(self._plan.cuts.pieces(len(tokens), self._plan.chunk_size))
        for begin, end in chunks[:-1]:
            self._read_bounded_chunk(tokens[begin:end], note, NOTHING)
            self._evicting.evict_if_due()
        return self._read_bounded_chunk(tokens[chunks[-1][0] :], note, wanted)

    def _read_bounded_chunk(self, tokens: Tokens, note: Callable[[int], object], wanted: Wanted) -> StepResult:
        self._evicting.free_room(len(tokens))
        self._feeder.make_room(len(tokens))
        return self._feeder.feed(tokens, note, wanted)

    def _restart(
        self, tokens: Tokens, variant: int, progress: Callable[[int], object] | None, wanted: Wanted
    ) -> StepResult:
        """Read the whole sequence again with the frequencies of its new length, as transformers does."""
        state = self._state
        if state.lengths.evicted_at:
            raise CapacityError(
                f"past {self._rope_limits[state.variant]} tokens this model rotates all keys anew, "
                "but some were evicted; start a session whose first prompt is that long"
            )
        everything = np.concatenate([np.array(state.history, np.int64), tokens])
        with self._evicting.reading_again():
            state.lengths.clear()
            state.tokens.clear()
            state.variant = variant
            return self._read_on(everything, progress, wanted)

    @contextlib.contextmanager
    def _ending_at_what_was_read(self) -> Iterator[None]:
        """Let given tokens be read; where that ends early, all that no chunk read is the caller's to give again."""
        read = self._state.fed
        try:
            yield
        except CapacityError:
            if self._state.fed != read:  # else nothing was read, and the token that waited still waits
                self._state.forget_pending()
            raise
        except BaseException:
            self._state.forget_pending()
            raise


def _take_no_note(count: int) -> None:
    """Take the size of a chunk that was read, and do nothing."""
