"""What drafters that run a graph have in common: drafts of many sequences are made together, in rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ortolan.errors import CapacityError, OrtolanError
from ortolan.runtime.generate.draw import Draw
from ortolan.runtime.options import Sampling
from ortolan.runtime.steps.feeder import Feeder, Wanted
from ortolan.runtime.steps.row import Row
from ortolan.runtime.steps.stepper import BAD
from ortolan.runtime.steps.together import Ask, Packing, Taken, Work, run_together

FEW_TOKENS = 16  # that a drafter reads whatever the budget


class NoDraftRoomError(CapacityError):
    """The caches of drafts are full; the sequence that asks has given its own back, and may ask again."""


@dataclass(slots=True)
class ReadingBudget:
    """Tokens that drafters may still read of what was known before, in a step of an engine.

    Attributes:
        left: their number.
    """

    left: int

    def grant(self, wanted: int) -> int:
        """Take up to so many tokens out, and return how many."""
        granted = min(wanted, self.left)
        self.left -= granted
        return granted


@dataclass(frozen=True, slots=True)
class Place:
    """Where a drafter works.

    Attributes:
        feeder: of its caches.
        packing: runs its steps.
        give_back: lets the caches go.
    """

    feeder: Feeder
    packing: Packing
    give_back: Callable[[], None]


class PackedDrafter(ABC):
    """Drafts by a graph of its own, in steps that others may share.

    Attributes:
        cost: of one drafted token, as a share of a step of the model.
    """

    def __init__(self, place: Place, cost: float) -> None:
        """Draft over the caches of a place."""
        self.cost = cost
        self._feeder, self._packing, self._give_back = place.feeder, place.packing, place.give_back

    @property
    def bytes(self) -> int:
        """Bytes of its caches, pages without tokens included, and of the steps' inputs and outputs."""
        room = self._feeder.room
        return room.bytes + room.free_bytes + self._packing.stepper.bytes

    def propose(self, tokens: Sequence[int], count: int, sampling: Sampling) -> list[int]:
        """Return a draft of at most `count` tokens, all known tokens read before. Raises OrtolanError."""
        [draft] = run_together([self.drafting(tokens, count, sampling, ReadingBudget(len(tokens)))])
        if isinstance(draft, OrtolanError):
            raise draft
        return draft

    @abstractmethod
    def drafting(self, tokens: Sequence[int], count: int, sampling: Sampling, budget: ReadingBudget) -> Work[list[int]]:
        """Draft as `propose` does; where the budget does not allow to read all tokens, read some, and draft nothing.

        Args:
            tokens: of the sequence. They begin with those of the last call, but for what `forget` was told of.
            count: at least 1.
            sampling: by which the model chooses.
            budget: shared by all that draft in a step.

        Raises:
            NoDraftRoomError: the caches are full.
            OrtolanError: a step failed.
        """

    @abstractmethod
    def is_likely(self, tokens: Sequence[int], known: int) -> bool:
        """Say whether there may be a draft soon."""

    @abstractmethod
    def forget(self, length: int) -> None:
        """Take note that tokens from that length on are others now."""

    def close(self) -> None:
        """Give the caches back; the drafter is not used again."""
        self._give_back()

    def _make_room(self, count: int) -> None:
        """Make room for so many more tokens; where there is none, give back what the sequence has."""
        try:
            self._feeder.make_room(count)
        except CapacityError as error:
            self._feeder.rewind(0)
            raise NoDraftRoomError(str(error)) from error

    def _draft(
        self, given: list[int], draws: Sequence[Draw], first: Callable[[Row], Row], later: Callable[[Row], Row]
    ) -> Work[list[int]]:
        """Read the last known tokens, and apply the graph to its own choices; those fed count as written alone.

        On a device each choice is fed before the host has seen it, unless the choice depends on those before.

        Args:
            given: tokens that are known, the last ones of the sequence.
            draws: how each token of the draft is chosen.
            first: completes the row of known tokens.
            later: completes each of the other rows.

        Returns:
            The draft, up to an end-of-sequence token.
        """
        feeder, packing = self._feeder, self._packing
        before = (None,) * (len(given) - 1) if len(given) <= FEW_TOKENS else ()
        feeder.discard(len(given))
        taken = [(yield Ask(packing, first(feeder.row(given, 0, Wanted(draws=(*before, draws[0]))))))]
        feeder.count(given)
        drafted: list[int] = []
        for ahead, draw in enumerate(draws[1:]):
            if not packing.stepper.depth:
                drafted.append(taken[-1].token())
                if self._ends(drafted[-1]):
                    break
            feeder.discard(ahead + 1)
            row = later(feeder.row([0], ahead, Wanted(draws=(draw,))))
            taken.append((yield Ask(packing, row, follows=taken[-1])))
        return self._until_end(taken)

    def _ends(self, token: int) -> bool:
        return token == BAD or token in self._feeder.manifest.eos_token_ids

    def _until_end(self, taken: Sequence[Taken]) -> list[int]:
        """Return the tokens chosen, up to one that ends the sequence, and before one that is not a number."""
        drafted: list[int] = []
        for each in taken:
            token = each.token()
            if token == BAD:
                break
            drafted.append(token)
            if self._ends(token):
                break
        return drafted


def draws_of(sampling: Sampling, tokens: Sequence[int], count: int) -> list[Draw]:
    """Say how the next tokens are chosen: as the model will, but for a penalty of what was drafted before each."""
    seen = tokens if sampling.repetition_penalty != 1.0 else ()
    seed, length = int(sampling.seed or 0), len(tokens)
    return [Draw(sampling=sampling, seed=seed, position=length + i, seen=seen) for i in range(count)]
