"""Drafts with a session of a smaller model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ortolan.errors import CapacityError
from ortolan.runtime.options import Sampling

if TYPE_CHECKING:
    from ortolan.runtime.session import Session


class ModelDrafter:
    """A session of the smaller model, which follows the sequence: it reads what is new and forgets what was wrong.

    It chooses by the sampling of the sequence, whose random numbers belong to positions: where both models would draw
    from like probabilities, the same number mostly points to the same token.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def propose(self, tokens: Sequence[int], count: int, sampling: Sampling) -> list[int]:
        """Return what the smaller model generates; nothing where its context is too short, or after its end."""
        session = self._session
        count = min(count, session.plan.max_context - len(tokens) + 1)
        if count < 1:
            return []
        common = count_common(session.state.history, tokens)
        if common < session.logical_length or session.state.pending:
            try:
                session.rewind(common)
            except CapacityError:  # a ring has overwritten what the sequence went back past
                session.rewind(0)
                common = 0
        return list(session.generate(tokens[common:], count, sampling))

    def is_likely(self, tokens: Sequence[int], known: int) -> bool:
        """Say whether the smaller model's context is long enough."""
        return known < self._session.plan.max_context


def count_common(history: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many first tokens are the same, all but the last at most: one is always read for its logits."""
    most = min(len(history), len(tokens) - 1)
    if list(history[:most]) == list(tokens[:most]):
        return most
    return next(i for i in range(most) if history[i] != tokens[i])
