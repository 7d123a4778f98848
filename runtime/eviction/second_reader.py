"""Reads a sequence a second time, behind itself, and collects what that reading attends to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortolan.errors import CapacityError
from ortolan.policies.eviction import SecondReading
from ortolan.runtime.caches.plan import rope_variant
from ortolan.runtime.device.buffers import Array
from ortolan.runtime.eviction.piece_scores import PieceScores
from ortolan.runtime.steps.feeder import Feeder

LEAST_ROOM = 16  # tokens; with less room behind a sequence, reading it again would take too many steps


@dataclass(frozen=True, slots=True)
class Piece:
    """One step of a second reading: it reads positions `lead` .. `end`, and the queries of `begin` .. `end` score."""

    lead: int
    begin: int
    end: int


def plan_pieces(count: int, reading: SecondReading, room: int) -> Iterator[Piece]:
    """Cut the tokens 0 .. `count` into pieces that take at most `room` tokens each, with their leads.

    Leads get at most half of the room. The first piece has none, as nothing stands before it.
    """
    lead = min(reading.lead_tokens, room // 2)
    size = min(reading.piece_tokens, room - lead)
    for begin in range(0, count, size):
        yield Piece(max(0, begin - lead), begin, min(begin + size, count))


class SecondReader:
    """Reads one sequence again, which is the same afterwards, also where that ends early."""

    def __init__(self, feeder: Feeder, reading: SecondReading, ort_session: Any) -> None:
        """Take the session of the graph that scores by a piece."""
        self._feeder, self._reading, self._ort_session = feeder, reading, ort_session

    def check_room(self, count: int) -> None:
        """Refuse `count` more tokens that would leave no room for a second reading.

        Raises:
            CapacityError: the positions of the model's RoPE tables end too early; nothing was read.
        """
        length = self._feeder.state.fed + count
        room = self._room(length)
        needed = min(LEAST_ROOM, self._wanted(length))
        if room < needed:
            raise CapacityError(
                f"the eviction reads the sequence again behind its end, at {needed} positions or more, and after "
                f"{length} tokens this model has {max(room, 0)} left; read at most {length - needed + max(room, 0)}, "
                "make the model folder again with a larger max_context (--max-context), or choose another policy"
            )

    def scores(self) -> dict[int, Array]:
        """Read the sequence again; returns the largest probability of each cached position.

        Returns:
            For each evictable layer [1, Hkv, C] float32, on the device.

        Raises:
            CapacityError: there is no memory for it, or no room.
            NumericError: the model produced NaN or infinity.
            SessionInterruptedError: somebody asked.
            OrtolanError: ONNX Runtime failed. As with all of these, nothing was evicted.
        """
        feeder, length = self._feeder, self._feeder.state.fed
        self.check_room(0)
        room = min(self._room(length), self._wanted(length))
        feeder.make_room(room)
        collected = PieceScores(self._ort_session, feeder.caches)
        tokens = np.array(feeder.state.history, np.int64)
        for piece in plan_pieces(length, self._reading, room):
            feeder.interrupt.check()
            captures = feeder.caches.store.make_captures(piece.end - piece.begin)
            feeder.read_and_forget(tokens[piece.lead : piece.end], captures)
            collected.add(captures, feeder.state, piece.end - piece.lead)
            feeder.stats.reread_tokens += piece.end - piece.lead
        return collected.scores

    def _wanted(self, length: int) -> int:
        """Return the most tokens of a step, where there is room: no more than rings can take back."""
        return min(self._reading.step_tokens, self._feeder.plan.chunk_size, length)

    def _room(self, length: int) -> int:
        """Return how many positions there are behind `length` tokens."""
        plan, manifest = self._feeder.plan, self._feeder.manifest
        end = plan.max_context + plan.spare
        if manifest.ropes is None:  # rotations may come from tables, which end
            end = min(end, manifest.rope_limits[rope_variant(manifest.rope_limits, length)])
        return end - length
