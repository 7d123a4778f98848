"""Says when a session evicts, does it, and keeps the captured queries fit for the next eviction."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ortolan.errors import OrtolanError
from ortolan.policies import Eviction
from ortolan.runtime.caches.captures import Captures
from ortolan.runtime.eviction.evictor import NO_SCORES, bind_eviction, evict
from ortolan.runtime.eviction.second_reader import SecondReader
from ortolan.runtime.steps.feeder import Feeder

_log = logging.getLogger(__name__)


class Evicting:
    """Evicts from the caches that a feeder fills; without options it does nothing.

    Attributes:
        options: of the eviction; None: never.
        on_lost: called where tokens that counted as read are gone, so that nothing builds on them.
    """

    def __init__(self, feeder: Feeder, options: Eviction | None, ort_session: Any, score_session: Any) -> None:
        """Take the sessions of the eviction graph, and of the one that scores by a second reading, if there is one."""
        self.options = options
        self.on_lost: Callable[[], object] = lambda: None
        self._feeder, self._ort_session = feeder, ort_session
        self._state, self._plan = feeder.state, feeder.plan
        self._reading = options.second_reading if options else None
        self._second = SecondReader(feeder, self._reading, score_session) if self._reading else None

    def is_due(self, count: int) -> bool:
        """Say whether `count` more tokens bring an eviction: they make a full-attention cache pass the budget.

        Where an eviction takes a second reading, only tokens enough for a piece of it bring another one.
        """
        lengths = self._state.lengths
        if self.options is None or lengths.most_held + count <= self.options.budget:
            return False
        if self._reading is None or not lengths.evicted_at:
            return True
        return lengths.logical + count - lengths.evicted_at >= self._reading.piece_tokens

    @property
    def reads_again(self) -> bool:
        """Whether an eviction is due that takes a second reading, whose steps take the place of the last one's."""
        return self._second is not None and self.is_due(0)

    def check_room(self, count: int) -> None:
        """Raise CapacityError where `count` more tokens bring an eviction that has no room; nothing was read."""
        if self._second is not None and self.is_due(count):
            self._second.check_room(count)

    def binding_ahead(self, count: int) -> Callable[[], object] | None:
        """Return what binds the eviction graph, while a device is at work, where `count` tokens bring an eviction."""
        options = self.options
        if options is None or count < 2 or not self.is_due(count):
            return None
        return lambda: bind_eviction(self._ort_session, self._feeder.caches, options)

    def free_room(self, count: int) -> None:
        """Evict where a bounded cache has no room for `count` more tokens."""
        if self._plan.bound is not None and self._plan.bound - self._state.lengths.most_held < count:
            self.prepare_capture(0)
            self.evict_if_due()

    def evict_if_due(self) -> None:
        """Evict where a cache holds more than the budget.

        Raises:
            OrtolanError: the eviction failed; the sequence is empty then, as what its caches hold is not known. Where a
                second reading failed, was interrupted, or had no memory, it is what it was, and nothing was evicted.
        """
        if self.options is None or not self.is_due(0):
            return
        start = time.perf_counter()
        feeder, state, lengths = self._feeder, self._state, self._state.lengths
        is_first = lengths.evicted_at == 0
        scores = self._second.scores() if self._second else NO_SCORES
        captured = self._copy_captures()  # first, so that where there is no memory for them nothing has changed
        heads = {i: feeder.manifest.layers[i].num_kv_heads for i in state.captures}
        physical = {i: lengths.physical_of(i, count) for i, count in heads.items()}
        try:
            place = (physical, lengths.logical, state.variant)
            keep = evict(self._ort_session, feeder.caches, self.options, *place, scores=scores)
            lengths.record_eviction(keep, heads)
        except OrtolanError as error:
            self._lose()
            raise OrtolanError(f"{error}; the caches are lost, so the session is empty again") from error
        except BaseException:  # an interrupt leaves rows moved, and no record of which
            self._lose()
            raise
        state.captured_at_eviction = captured
        self._shrink(is_first=is_first)
        feeder.stats.evictions += 1
        seconds = time.perf_counter() - start
        feeder.stats.eviction_seconds += seconds
        _log.info("evicted after %d tokens: %d are held, in %.3f s", lengths.logical, lengths.most_held, seconds)

    def prepare_capture(self, count: int) -> None:
        """Restore captured queries that a rewind left stale, if the next `count` tokens bring an eviction.

        Queries before the last eviction come from a copy made then: their keys are gone. Later ones are
        captured by feeding their tokens again.

        Raises:
            CapacityError: a ring no longer holds what these tokens look back on; nothing was read.
        """
        feeder, state, lengths = self._feeder, self._state, self._state.lengths
        begin = max(0, lengths.logical + count - feeder.capture_rows)  # the oldest query needed
        if not self.is_due(count) or begin >= lengths.captured_from:
            return
        first = max(begin, lengths.evicted_at)
        tail, pending = np.array(state.history[first:], np.int64), state.pending
        feeder.check_rewind(first)
        with self.reading_again():
            if begin < lengths.evicted_at:
                self._restore_captures()
            lengths.rewind(first, feeder.capture_rows, feeder.manifest.sink)
            lengths.captured_from = begin
            del state.tokens[first:]
            if len(tail):
                feeder.feed(tail, lambda _: None)
        state.tokens += pending

    @contextlib.contextmanager
    def reading_again(self) -> Iterator[None]:
        """Let tokens that count as read be read again; where that ends early, the sequence is shorter than it was."""
        try:
            yield
        except BaseException:
            self.on_lost()
            self._state.forget_pending()  # it would follow tokens that are gone
            raise

    def _lose(self) -> None:
        self.on_lost()
        self._feeder.rewind(0)

    def _copy_captures(self) -> Captures:
        with self._feeder.caches.buffers.scope():
            return self._feeder.caches.captures.copy()

    def _restore_captures(self) -> None:
        """Put the queries of the last eviction back; where they were not kept, zeros, which favour no position."""
        with self._feeder.caches.buffers.scope():
            for index, capture in self._state.captures.items():
                capture[:] = self._state.captured_at_eviction.get(index, 0)

    def _shrink(self, *, is_first: bool) -> None:
        """Give back what the eviction left free."""
        feeder = self._feeder
        store, held = feeder.caches.store, feeder.held()
        generation = store.generation
        capacities = {i: feeder.caches.capacity(i) for i in held}
        slots = {i: self._plan.evicted_capacity(capacities[i], held[i], is_first=is_first) for i in held}
        feeder.room.shrink({i: min(capacities[i], max(n, feeder.manifest.sink + 1)) for i, n in slots.items()}, held)
        if store.generation != generation:
            store.buffers.trim()
