"""Holds captured queries, the last ones of a sequence, which an eviction scores by."""

from __future__ import annotations

from collections.abc import Sequence

from ortolan.runtime.device.buffers import Array


class Captures(dict[int, Array]):
    """Captured queries [B, Wq, Hq, D] of each evictable layer, which lie in few blocks [n, B, Wq, Hq, D]."""

    def __init__(self, blocks: Sequence[tuple[tuple[int, ...], Array]] = ()) -> None:
        """Take the layers of each block, in their order."""
        self.blocks = blocks
        super().__init__(sorted((i, array[place]) for members, array in blocks for place, i in enumerate(members)))

    def copy(self) -> Captures:
        """Copy the arrays."""
        return Captures([(members, array.copy()) for members, array in self.blocks])
