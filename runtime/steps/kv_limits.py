"""Bounds what full-attention caches hold after a step by a rung of a ladder, since a captured graph keeps its bound.

One token of one sequence has kernels that are faster in short caches. The host chooses kernels before it knows lengths,
which lie on the device, so it is told a rung at or above the longest one.
"""

from __future__ import annotations

from ortolan.runtime.caches.plan import CachePlan
from ortolan.runtime.steps.layout import StepShape
from ortolan.runtime.steps.row import Row

SHORTEST = 2048  # tokens, of the lowest rung; each rung that a sequence passes takes a capture
NO_LIMIT = 0  # nothing is promised but the capacity of the caches


class KvLimits:
    """The ladder of one plan: powers of two from SHORTEST on, below the capacity of its full-attention caches."""

    def __init__(self, plan: CachePlan) -> None:
        self._capacity = max((layer.capacity for layer in plan.layers if layer.kind == "full"), default=0)

    def of_length(self, length: int) -> int:
        """Return the lowest rung at or above the tokens that a cache holds after the step; NO_LIMIT above the last."""
        rung = max(SHORTEST, 1 << (length - 1).bit_length())
        return rung if rung < self._capacity else NO_LIMIT

    def of_step(self, row: Row, shape: StepShape) -> int:
        """Return the limit of a captured step whose first row is given.

        The kernels that it is for take one token of one sequence. All other steps have no limit, so that each shape is
        captured once.
        """
        if shape.tokens > 1 or self._capacity <= SHORTEST:
            return NO_LIMIT
        return self.of_length(most_held(row) + 1)


def most_held(row: Row) -> int:
    """Return the most tokens that a full-attention cache holds before a step, in any layer and for any kv head."""
    return max((int(counts.max()) for counts in row.physical.values()), default=row.logical)
