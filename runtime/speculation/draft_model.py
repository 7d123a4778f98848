"""Drafts with a smaller model."""

from __future__ import annotations

from collections.abc import Sequence

from ortolan.errors import OrtolanError
from ortolan.runtime.caches.plan import rope_variant
from ortolan.runtime.options import Sampling
from ortolan.runtime.speculation.packed import FEW_TOKENS, PackedDrafter, Place, ReadingBudget, draws_of
from ortolan.runtime.steps.feeder import Wanted
from ortolan.runtime.steps.row import Row
from ortolan.runtime.steps.together import Ask, Work


class ModelDrafter(PackedDrafter):
    """A sequence of the smaller model that follows another: it reads what is new and forgets what was wrong.

    It chooses by the sampling of the sequence, whose random numbers belong to positions: where both models would draw
    from like probabilities, the same number mostly points to the same token.
    """

    def __init__(self, place: Place, cost: float) -> None:
        super().__init__(place, cost)
        self._sure = 0  # first tokens that are known to be those of the sequence; drafted ones may follow

    def drafting(self, tokens: Sequence[int], count: int, sampling: Sampling, budget: ReadingBudget) -> Work[list[int]]:
        """Draft what the smaller model would choose; nothing where its context is too short."""
        feeder = self._feeder
        count = min(count, feeder.plan.max_context - len(tokens) + 1)
        if count < 1:
            return []
        self._go_back(tokens, count)
        self._make_room(len(tokens) + count - 1 - feeder.state.fed)
        try:
            if not (yield from self._read(tokens, budget)):
                return []
            given = list(tokens[feeder.state.fed :])
            drafted = yield from self._draft(given, draws_of(sampling, tokens, count), _as_it_is, _as_it_is)
        except OrtolanError:
            feeder.rewind(0)
            raise
        feeder.count(drafted[:-1])  # these were fed, and the next draft compares them with the sequence
        self._sure = len(tokens) - 1  # the last one is not read yet, and may be forgotten
        return drafted

    def is_likely(self, tokens: Sequence[int], known: int) -> bool:
        """Say whether the smaller model's context is long enough."""
        return known < self._feeder.plan.max_context

    def forget(self, length: int) -> None:
        """Compare tokens from that length on anew."""
        self._sure = min(self._sure, length)

    def _go_back(self, tokens: Sequence[int], count: int) -> None:
        """Keep the tokens that both sequences begin with; at least one is left to read."""
        feeder, state = self._feeder, self._feeder.state
        most = min(state.fed, len(tokens) - 1)
        same = min(self._sure, most)
        while same < most and state.tokens[same] == tokens[same]:
            same += 1
        variant = rope_variant(feeder.plan.rope_limits, len(tokens) + count - 1)
        if variant != state.variant or (same < state.fed and feeder.rewind_problem(same)):
            same = 0
        if same < state.fed:
            feeder.rewind(same)
        if same == 0:
            feeder.caches.clear(state.lengths)
            state.variant = variant
        self._sure = same

    def _read(self, tokens: Sequence[int], budget: ReadingBudget) -> Work[bool]:
        """Read all but what the first round reads, as far as the budget allows; returns whether that is all."""
        feeder = self._feeder
        left = len(tokens) - feeder.state.fed
        most = feeder.plan.chunk_size
        while left > min(most, FEW_TOKENS):
            size = budget.grant(min(left - 1, most))
            if not size:
                return False
            begin = feeder.state.fed
            part = [int(token) for token in tokens[begin : begin + size]]
            feeder.discard(size)
            yield Ask(self._packing, feeder.row(part, 0, Wanted()))
            feeder.count(part)
            self._sure = begin + size
            left -= size
        return True


def _as_it_is(row: Row) -> Row:
    return row
