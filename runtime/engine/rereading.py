"""A prompt's second reading in an engine: a piece in a step, between the steps of other requests."""

from __future__ import annotations

from collections import deque

from ortolan.policies.eviction import SecondReading
from ortolan.runtime.eviction.piece_scores import PieceScores
from ortolan.runtime.eviction.second_reader import Piece, plan_pieces


class Rereading:
    """A second reading under way.

    Attributes:
        scores: of the pieces so far; None before the first.
    """

    def __init__(self, length: int, reading: SecondReading, room: int) -> None:
        """Begin with none of a sequence's first `length` tokens, of which a step reads at most `room`."""
        self.scores: PieceScores | None = None
        self._left = deque(plan_pieces(length, reading, room))

    @property
    def next(self) -> Piece:
        """The piece that is to be read next."""
        return self._left[0]

    @property
    def is_last(self) -> bool:
        """Whether no other follows."""
        return len(self._left) == 1

    def advance(self) -> None:
        """Go on to the piece behind the next."""
        self._left.popleft()
