"""Tracks how much one sequence has read, and how much of it each cache holds.

Logical length: tokens read. Physical length: tokens that a full-attention cache holds, per kv head; equal to
the logical length until an eviction. `highest`: the largest length the rings were ever written to. `rings_from`: the
shortest length that rings can go back to, where a saved session left older slots out. `states_from`: the shortest
length that recurrent states can go back to.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortolan.contract import RECENT_TOKENS

Positions: TypeAlias = npt.NDArray[np.int32]
Counts: TypeAlias = npt.NDArray[np.int32]


class Lengths:
    """The lengths of one sequence.

    Attributes:
        logical: tokens read.
        highest: the largest length that was ever written.
        rings_from: the shortest length that rings can go back to.
        states_from: the shortest length that recurrent states can go back to.
        evicted_at: logical length at the last eviction; nothing before it can be rewound to.
        captured_from: queries from here to the logical length, at most a window's, are captured.
        kept: positions that each evictable layer kept at the last eviction, [Hkv, K], -1 behind a shorter list.
        counts: their numbers, [Hkv].
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything, as for a new sequence."""
        self.logical = 0
        self.highest = 0
        self.rings_from = 0
        self.states_from = 0
        self.evicted_at = 0
        self.captured_from = 0
        self.kept: dict[int, Positions] = {}
        self.counts: dict[int, Counts] = {}

    def physical_at(self, logical: int) -> dict[int, Counts]:
        """Return the tokens in each cache that was evicted, per kv head [Hkv], once `logical` tokens are read.

        Empty before an eviction: all hold as many.
        """
        later = np.int32(logical - self.evicted_at)
        return {index: counts + later for index, counts in self.counts.items()}

    def physical_of(self, index: int, heads: int) -> Counts:
        """Return the tokens in one full-attention cache, per kv head [Hkv]."""
        if index in self.counts:
            return self.counts[index] + np.int32(self.logical - self.evicted_at)
        return np.full(heads, self.logical, np.int32)

    def held(self, index: int) -> int:
        """Return the tokens in one full-attention cache; where kv heads differ, the most."""
        if index in self.counts:
            return int(self.counts[index].max()) + self.logical - self.evicted_at
        return self.logical

    @property
    def most_held(self) -> int:
        """The most tokens in any full-attention cache that can be evicted."""
        if not self.counts:
            return self.logical
        return max(int(counts.max()) for counts in self.counts.values()) + self.logical - self.evicted_at

    def advance(self, count: int) -> None:
        """Record that `count` tokens were appended everywhere."""
        self.logical += count
        self.highest = max(self.highest, self.logical)

    def rewind(self, length: int, capture_rows: int, sink: int) -> None:
        """Go back to a logical length at or after the last eviction."""
        removed = self.logical - length
        self.advance(-removed)
        self.captured_from = min(self.captured_from, length)
        self.discard(removed, capture_rows)
        if length <= sink:  # sinks are never overwritten, and all else will be written anew
            self.highest, self.rings_from = length, 0

    def discard(self, count: int, capture_rows: int) -> None:
        """Record that `count` tokens were written past the logical length, and do not count."""
        written = self.logical + count
        self.states_from = written if count > RECENT_TOKENS else max(self.states_from, written - RECENT_TOKENS)
        self.highest = max(self.highest, written)
        # They took the rows of the queries `capture_rows` before them.
        self.captured_from = max(self.captured_from, min(self.logical, written - capture_rows))

    def record_eviction(self, keep: dict[int, npt.NDArray[Any]], heads: dict[int, int]) -> None:
        """Record which physical positions each layer kept.

        Args:
            keep: [Hkv or 1, K] of each evictable layer, -1 behind those of a shorter list.
            heads: Hkv of each.
        """
        kept = {
            index: self._logical_of(index, np.broadcast_to(positions, (heads[index], positions.shape[1])))
            for index, positions in keep.items()
        }
        self.counts = {index: _count_held(positions) for index, positions in kept.items()}
        self.kept = {index: positions[:, : self.counts[index].max()] for index, positions in kept.items()}
        self.evicted_at = self.logical

    def _logical_of(self, index: int, physical: Positions) -> Positions:
        """Return the logical positions of physical ones [Hkv, K], -1 where these are."""
        earlier = self.kept.get(index)
        if earlier is None or not earlier.size:
            return np.array(physical, np.int32)
        counts = self.counts[index][:, None]
        old = np.take_along_axis(earlier, physical.clip(0, earlier.shape[1] - 1), axis=1)
        newer = physical - counts + np.int32(self.evicted_at)
        return np.where(physical < 0, np.int32(-1), np.where(physical < counts, old, newer))


def _count_held(positions: Positions) -> Counts:
    """Count the positions of each list [Hkv, K], which -1 may follow."""
    heads, width = positions.shape
    counts = np.full(heads, width, np.int32)
    if width and positions[:, -1].min() < 0:  # rarely, and counting takes longer
        counts[:] = np.count_nonzero(positions >= 0, axis=1)
    return counts
