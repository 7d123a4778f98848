"""What proposes tokens, and the rule by which their number follows from how many were right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ortolan.runtime.options import Sampling
from ortolan.runtime.speculation.options import Speculation
from ortolan.runtime.speculation.packed import NoDraftRoomError, PackedDrafter, ReadingBudget
from ortolan.runtime.steps.row import HiddenReader
from ortolan.runtime.steps.stepper import Stepper
from ortolan.runtime.steps.together import Work

SIZES = (1, 2, 4, 8)  # of drafts below the most: on CUDA each has a graph of its own
MOST_COST = 0.9  # of a token, so that drafts which are always right are made whatever they cost
ENGINE_COST = 0.3  # of one more token on the host, where a step feeds many sequences; measured with 16
HOST_COST, DEVICE_COST = 0.2, 0.06  # of one more token in a step, as a share of the step: about what was measured
MEMORY = 0.85  # share of what earlier drafts count once another was checked
FIRST_PAUSE, LONGEST_PAUSE = 8, 64  # steps


class Drafter(Protocol):
    """Proposes the tokens that follow one sequence."""

    def propose(self, tokens: Sequence[int], count: int, sampling: Sampling) -> list[int]:
        """Return at most `count` tokens; none where there is nothing to propose.

        Args:
            tokens: of the sequence, at least one; between two calls it may have changed in any way.
            count: at least 1.
            sampling: by which the model chooses, its seed a number.
        """

    def is_likely(self, tokens: Sequence[int], known: int) -> bool:
        """Say whether there may be a draft soon; where not, steps go on before their tokens are known.

        Args:
            tokens: of the sequence.
            known: of these, at least one; the one behind them is under way.
        """


@dataclass(slots=True)
class SpeculationStats:
    """What became of drafts.

    Attributes:
        drafted_tokens: that were checked.
        accepted_tokens: that were right.
        checks: steps that checked a draft. Each gives one token more than it accepts.
        without_room: drafts that were not made, as the caches of drafts were full.
    """

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    checks: int = 0
    without_room: int = 0

    @property
    def tokens_per_check(self) -> float | None:
        """Tokens that a step with a draft gave on average; None where there was none."""
        return None if not self.checks else (self.accepted_tokens + self.checks) / self.checks


class DraftLength:
    """How many tokens to draft: as long as the last of them is right more often than a token costs.

    The share of tokens that were right is that of the last few drafts. Where even one token is not worth a check, none
    is drafted for some steps, each time for longer. What the draft itself costs counts for its length alone: where only
    some sequences of an engine pause, the others' drafts cost nearly as much.
    """

    def __init__(self, most: int, token_cost: float = HOST_COST) -> None:
        """Start; `token_cost` is that of a token more in a step, as a share of the step."""
        self._token_cost = self._cost = token_cost
        self._sizes = (*(size for size in SIZES if size < most), most)
        self._right, self._tried = 2.1, 3.0  # as if some drafts had been checked, 70 % of whose tokens were right
        self._pause, self._next_pause = 0, FIRST_PAUSE

    @property
    def count(self) -> int:
        """Tokens to draft now; 0 in a pause."""
        if self._pause:
            return 0
        share = self._right / self._tried
        return max((size for size in self._sizes if share**size >= self._cost), default=self._sizes[0])

    def count_draft_cost(self, cost: float) -> None:
        """Take into account what it costs to draft a token, as a share of the step."""
        self._cost = min(MOST_COST, self._token_cost + cost)

    def fit(self, count: int) -> int:
        """Return the largest size of drafts up to `count`; 0 where there is none."""
        return max((size for size in self._sizes if size <= count), default=0)

    def skip(self) -> None:
        """Count a step without a draft."""
        self._pause = max(0, self._pause - 1)

    def note(self, drafted: int, accepted: int) -> None:
        """Take note of a draft that was checked."""
        self._right = self._right * MEMORY + accepted
        self._tried = self._tried * MEMORY + min(accepted + 1, drafted)
        if self._right / self._tried >= self._token_cost:
            self._next_pause = FIRST_PAUSE
        else:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)


class Speculator:
    """Drafts for one generation.

    Attributes:
        stats: what became of its drafts.
    """

    def __init__(
        self,
        open_drafter: Callable[[], Drafter],
        options: Speculation,
        vocab_size: int,
        token_cost: float = HOST_COST,
    ) -> None:
        """Draft as the options say; the drafter is opened by the first draft, or where it takes hidden states."""
        self._open, self._reads_hidden = open_drafter, options.reads_hidden
        self._drafter: Drafter | None = None
        self._reader: HiddenReader | None = None  # the drafter, where it is one
        self._length, self._vocab_size = DraftLength(options.tokens, token_cost), vocab_size
        self.stats = SpeculationStats()

    def open_reader(self) -> HiddenReader | None:
        """Return what takes the hidden states of all steps; None: nobody does. Raises as opening the drafter does."""
        if not self._reads_hidden:
            return None
        if self._drafter is None:
            try:
                self._opened()
            except NoDraftRoomError:
                return None
        return self._reader

    @property
    def shares_rounds(self) -> bool:
        """Whether drafts are made by a graph, in rounds that cost about the same for one sequence and for many."""
        return isinstance(self._drafter, PackedDrafter)

    def wants_to_draft(self, tokens: Sequence[int], known: int) -> bool:
        """Say whether the next step may check a draft, so that what follows the known tokens is to be waited for."""
        return self._length.count > 0 and (self._drafter is None or self._drafter.is_likely(tokens, known))

    def draft_count(self, most: int) -> int:
        """Return how many tokens a draft has now, at most `most`; 0: there is none."""
        return self._length.fit(min(self._length.count, most))

    def draft(self, tokens: Sequence[int], most: int, sampling: Sampling) -> list[int]:
        """Return tokens to check after those of a sequence, at most `most`; none where there is nothing to check."""
        count = self.draft_count(most)
        if not count:
            return []
        try:
            return self._fitting(self._opened().propose(tokens, count, sampling), count)
        except NoDraftRoomError:
            self.stats.without_room += 1
            return []

    def drafting(self, tokens: Sequence[int], count: int, sampling: Sampling, budget: ReadingBudget) -> Work[list[int]]:
        """Draft as `draft` does, in steps that others share; nothing where the caches of drafts are full.

        Args:
            tokens: of the sequence.
            count: what `draft_count` said.
            sampling: by which the model chooses.
            budget: of tokens that are read, with all that share the steps.
        """
        try:
            drafter = self._opened()
            if isinstance(drafter, PackedDrafter):
                proposed = yield from drafter.drafting(tokens, count, sampling, budget)
            else:
                proposed = drafter.propose(tokens, count, sampling)
        except NoDraftRoomError:
            self.stats.without_room += 1
            return []
        return self._fitting(proposed, count)

    def skip(self) -> None:
        """Count a step without a draft."""
        self._length.skip()

    def note(self, drafted: int, accepted: int) -> None:
        """Take note of a draft that was checked."""
        self._length.note(drafted, accepted)
        self.stats.drafted_tokens += drafted
        self.stats.accepted_tokens += accepted
        self.stats.checks += 1

    def close(self) -> None:
        """Give back what the drafter holds; a later draft opens another one."""
        if isinstance(self._drafter, PackedDrafter):
            self._drafter.close()
        self._drafter = self._reader = None

    def _fitting(self, proposed: Sequence[int], count: int) -> list[int]:
        """Return the first tokens of a draft: up to one that is none, and as many as a draft may have."""
        known = next((i for i, token in enumerate(proposed) if not 0 <= token < self._vocab_size), len(proposed))
        return list(proposed[: self._length.fit(min(known, count))])

    def _opened(self) -> Drafter:
        if self._drafter is None:
            self._drafter = self._open()
            self._reader = self._drafter if isinstance(self._drafter, HiddenReader) else None
            if isinstance(self._drafter, PackedDrafter):
                self._length.count_draft_cost(self._drafter.cost)
        return self._drafter


def count_accepted(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Return how many tokens of a draft are those that the model chose; `chosen` begins with the one after none."""
    pairs = zip(drafts, chosen, strict=False)
    return next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(drafts))


def token_cost(stepper: Stepper, sequences: int = 1) -> float:
    """Return what one more token costs in a step, as a share of the step; of many sequences, of one's part of it."""
    if stepper.depth:
        return DEVICE_COST
    return HOST_COST if sequences == 1 else ENGINE_COST
