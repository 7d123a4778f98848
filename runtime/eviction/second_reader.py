"""Reads a sequence a second time, behind itself, and collects what that reading attends to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortolan.errors import CapacityError
from ortolan.manifest import Manifest
from ortolan.policies.eviction import SecondReading
from ortolan.runtime.caches.plan import CachePlan, rope_variant
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

    @property
    def length(self) -> int:
        """The tokens that it reads."""
        return self.end - self.lead


def plan_pieces(count: int, reading: SecondReading, room: int) -> Iterator[Piece]:
    """Cut the tokens 0 .. `count` into pieces that take at most `room` tokens each, with their leads.

    Leads get at most half of the room. The first piece has none, as nothing stands before it.
    """
    lead = min(reading.lead_tokens, room // 2)
    size = min(reading.piece_tokens, room - lead)
    for begin in range(0, count, size):
        yield Piece(max(0, begin - lead), begin, min(begin + size, count))


def room_behind(length: int, reading: SecondReading, plan: CachePlan, manifest: Manifest) -> int:
    """Return how many tokens of a second reading a step takes behind `length` tokens.

    They are no more than rings can take back.

    Raises:
        CapacityError: there are too few positions.
    """
    end = plan.max_context + plan.spare
    if manifest.ropes is None:  # rotations may come from tables, which end
        end = min(end, manifest.rope_limits[rope_variant(manifest.rope_limits, length)])
    most = min(reading.step_tokens, plan.chunk_size, length)
    room, needed = max(end - length, 0), min(LEAST_ROOM, most)
    if room < needed:
        raise CapacityError(
            f"the eviction reads the sequence again behind its end, at {needed} positions or more, and after "
            f"{length} tokens this model has {room} left; read at most {length - needed + room}, "
            "make the model folder again with a larger max_context (--max-context), or choose another policy"
        )
    return min(room, most)


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
        self._room(self._feeder.state.fed + count)

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
        room = self._room(length)
        feeder.make_room(room)
        collected = PieceScores(self._ort_session, feeder.caches)
        tokens = np.array(feeder.state.history, np.int64)
        for piece in plan_pieces(length, self._reading, room):
            feeder.interrupt.check()
            captures = feeder.caches.store.make_captures(piece.end - piece.begin)
            feeder.read_and_forget(tokens[piece.lead : piece.end], captures)
            collected.add(captures, feeder.state, piece.length)
            feeder.stats.reread_tokens += piece.length
        return collected.scores

    def _room(self, length: int) -> int:
        return room_behind(length, self._reading, self._feeder.plan, self._feeder.manifest)
