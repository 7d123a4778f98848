"""The half of a session that evicts: it says when, and keeps the captured queries fit for the next eviction."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import OrtolanError
from ortolan.manifest import Manifest
from ortolan.policies import Eviction
from ortolan.runtime.buffers import Array
from ortolan.runtime.caches import CacheBuffers
from ortolan.runtime.evictor import evict
from ortolan.runtime.lengths import Lengths
from ortolan.runtime.plan import CachePlan
from ortolan.runtime.stats import Stats


class EvictingSession(abc.ABC):
    """Evicts from the caches that the other half, `Session`, fills."""

    plan: CachePlan
    stats: Stats
    _manifest: Manifest
    _snapkv: Eviction | None
    _evict_session: Any
    _caches: CacheBuffers
    _lengths: Lengths
    _history: list[int]
    _variant: int
    _capture_rows: int
    _captured_at_eviction: dict[int, Array]

    @property
    @abc.abstractmethod
    def logical_length(self) -> int:
        """Tokens read so far."""

    @abc.abstractmethod
    def cache_capacity(self, layer: int) -> int:
        """Return the slots of one layer's cache now."""

    @abc.abstractmethod
    def rewind(self, length: int) -> None:
        """Forget all tokens from logical position `length` on."""

    @abc.abstractmethod
    def _reading_again(self) -> AbstractContextManager[None]:
        """Let tokens that count as read be read again; where that ends early, the sequence is shorter than it was."""

    @abc.abstractmethod
    def _read(self, tokens: npt.NDArray[np.int64], note: Callable[[int], object]) -> Any:
        """Run the decoder over tokens in chunks; `note` is called with the size of each that is read."""

    def _is_due(self, count: int) -> bool:
        """Say whether `count` more tokens make a full-attention cache pass the budget."""
        held = max(self._lengths.held().values(), default=0)
        return self._snapkv is not None and held + count > self._snapkv.budget

    def _free_room(self, count: int) -> None:
        """Evict where a bounded cache has no room for `count` more tokens."""
        if self.plan.bound is not None and self.plan.bound - max(self._lengths.held().values()) < count:
            self._prepare_capture(0)
            self._evict_if_due()

    def _evict_if_due(self) -> None:
        if self._snapkv is None or not self._is_due(0):
            return
        start = time.perf_counter()
        physical, caches, is_first = self._lengths.physical, self._caches, self._lengths.evicted_at == 0
        captured = caches.copy_captures()  # first, so that where there is no memory for them nothing has changed
        try:
            keep = evict(self._evict_session, caches, self._snapkv, physical, self.logical_length, self._variant)
            self._lengths.record_eviction(keep)
        except OrtolanError as error:
            self.rewind(0)
            raise OrtolanError(f"{error}; the caches are lost, so the session is empty again") from error
        except BaseException:  # an interrupt leaves rows moved, and no record of which
            self.rewind(0)
            raise
        self._captured_at_eviction, generation = captured, caches.generation
        held = self._lengths.held()
        capacities = {i: self.cache_capacity(i) for i in held}
        slots = {i: self.plan.evicted_capacity(capacities[i], held[i], is_first=is_first) for i in held}
        caches.shrink({i: min(capacities[i], max(n, self._manifest.sink + 1)) for i, n in slots.items()}, held)
        if caches.generation != generation:
            caches.buffers.trim()
        self.stats.evictions += 1
        self.stats.eviction_seconds += time.perf_counter() - start

    def _prepare_capture(self, count: int) -> None:
        """Restore captured queries that a rewind left stale, if the next `count` tokens bring an eviction.

        Queries before the last eviction come from a copy made then: their keys are gone. Later ones are
        captured by feeding their tokens again.

        Raises:
            CapacityError: a ring no longer holds what these tokens look back on; nothing was read.
        """
        lengths = self._lengths
        begin = max(0, lengths.logical + count - self._capture_rows)  # the oldest query needed
        if not self._is_due(count) or begin >= lengths.captured_from:
            return
        first = max(begin, lengths.evicted_at)
        tail = np.array(self._history[first:], np.int64)
        lengths.check_rewind(first, self.plan)
        with self._reading_again():
            if begin < lengths.evicted_at:
                self._caches.restore_captures(self._captured_at_eviction)
            lengths.rewind(first, self._capture_rows)
            lengths.captured_from = begin
            del self._history[first:]
            if len(tail):
                self._read(tail, lambda _: None)
