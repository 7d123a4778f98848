"""Tracks how much one sequence has read, and how much of it each cache holds.

Logical length: tokens read. Physical length: tokens that a full-attention cache holds, per kv head; equal to
the logical length until an eviction. `highest`: the largest length the rings were ever written to. `rings_from`: the
shortest length that rings can go back to, where a saved session left older slots out.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortolan.errors import CapacityError
from ortolan.manifest import Manifest
from ortolan.runtime.plan import CachePlan, ring_keeps

Positions: TypeAlias = npt.NDArray[np.int32]


class Lengths:
    """The lengths of one sequence."""

    def __init__(self, manifest: Manifest) -> None:
        self._full_layers = [i for i, layer in enumerate(manifest.layers) if layer.window < 0]
        self._sink = manifest.sink
        self._kv_heads = {i: layer.num_kv_heads for i, layer in enumerate(manifest.layers) if layer.evictable}
        self.clear()

    def clear(self) -> None:
        """Forget everything, as for a new sequence."""
        self.logical = 0
        self.highest = 0
        self.rings_from = 0
        self.evicted_at = 0  # logical length at the last eviction; nothing before it can be rewound to
        self.captured_from = 0  # queries from here to the logical length, at most a window's, are captured
        self.physical = {i: np.zeros(heads, np.int32) for i, heads in self._kv_heads.items()}
        self.kept: dict[int, Positions] = {}  # [Hkv, K] of the last eviction, -1 behind those of a shorter list

    def held(self) -> dict[int, int]:
        """Return how many tokens each full-attention cache holds, by layer; where kv heads differ, the most."""
        physical = {index: int(lengths.max()) for index, lengths in self.physical.items()}
        return {index: physical.get(index, self.logical) for index in self._full_layers}

    def advance(self, count: int) -> None:
        """Record that `count` tokens were appended everywhere."""
        self.logical += count
        self.highest = max(self.highest, self.logical)
        for lengths in self.physical.values():
            lengths += count

    def rewind(self, length: int, capture_rows: int) -> None:
        """Go back to a logical length at or after the last eviction."""
        removed = self.logical - length
        self.advance(-removed)
        self.captured_from = min(self.captured_from, length)
        self.discard(removed, capture_rows)
        if length <= self._sink:  # sinks are never overwritten, and all else will be written anew
            self.highest, self.rings_from = length, 0

    def discard(self, count: int, capture_rows: int) -> None:
        """Record that `count` tokens were written past the logical length, and do not count."""
        written = self.logical + count
        self.highest = max(self.highest, written)
        # They took the rows of the queries `capture_rows` before them.
        self.captured_from = max(self.captured_from, min(self.logical, written - capture_rows))

    def missing_ring(self, length: int, plan: CachePlan) -> int | None:
        """Return a ring layer that no longer holds the window before `length`."""
        for index, layer in enumerate(plan.layers):
            if layer.kind != "ring":
                continue
            left_out = self._sink < length < self.rings_from
            if left_out or not ring_keeps(length, self.highest, layer, self._sink):
                return index
        return None

    def check_rewind(self, length: int, plan: CachePlan) -> None:
        """Raise CapacityError where what position `length` looks back on is gone."""
        if length < self.evicted_at:
            raise CapacityError(
                f"rewind({length}): tokens before {self.evicted_at} were evicted from the "
                f"full-attention caches; rewind to {self.evicted_at} or later, or to 0"
            )
        layer = self.missing_ring(length, plan)
        if layer is None:
            return
        if length < self.rings_from:
            raise CapacityError(
                f"rewind({length}): the session was saved without what position {length} looks back on in layer "
                f"{layer}; rewind to {self.rings_from} or later, or to 0, or save with more rewind_tokens"
            )
        raise CapacityError(
            f"rewind({length}): the ring of layer {layer}, of {plan.layers[layer].capacity} slots, has "
            f"overwritten what position {length} looks back on; rewind to 0 and read the sequence again"
        )

    def record_eviction(self, keep: dict[int, npt.NDArray[Any]]) -> None:
        """Record which physical positions each layer kept, [Hkv or 1, K], -1 behind those of a shorter list."""
        for index, positions in keep.items():
            kept = self._logical_of(index, np.broadcast_to(positions, (self._kv_heads[index], positions.shape[1])))
            self.physical[index] = counts = _count_held(kept)
            self.kept[index] = kept[:, : counts.max()]
        self.evicted_at = self.logical

    def _logical_of(self, index: int, physical: Positions) -> Positions:
        """Return the logical positions of physical ones [Hkv, K], -1 where these are."""
        earlier = self.kept.get(index)
        if earlier is None or not earlier.size:
            return np.array(physical, np.int32)
        counts = _count_held(earlier)[:, None]
        old = np.take_along_axis(earlier, physical.clip(0, earlier.shape[1] - 1), axis=1)
        newer = physical - counts + np.int32(self.evicted_at)
        return np.where(physical < 0, np.int32(-1), np.where(physical < counts, old, newer))


def _count_held(positions: Positions) -> npt.NDArray[np.int32]:
    """Count the positions of each list [Hkv, K], which -1 may follow."""
    heads, width = positions.shape
    counts = np.full(heads, width, np.int32)
    if width and positions[:, -1].min() < 0:  # rarely, and counting takes longer
        counts[:] = np.count_nonzero(positions >= 0, axis=1)
    return counts
