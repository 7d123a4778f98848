"""Drafts for the requests of an engine's step, all together."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ortolan.errors import OrtolanError
from ortolan.runtime.engine.request import Request
from ortolan.runtime.speculation.packed import ReadingBudget
from ortolan.runtime.speculation.pools import DraftPools
from ortolan.runtime.steps.row import HiddenReader
from ortolan.runtime.steps.together import run_together

ROUND_PART = 4  # one of so many requests must want a round: a step of a small model takes a good part of one of a large

_log = logging.getLogger(__name__)


class Drafting:
    """Makes the drafts of an engine.

    Rules, in order:
     1. Drafts come after the tokens of all decodes, in a step of `chunk_tokens` tokens; the oldest requests first.
     2. Requests that draft with the same model or head share its steps: in each round, a row of each that wants more. A
        round takes about as long for few rows as for many, and all wait for it: it is left out where less than a
        quarter of these requests want it, but for the first.
     3. A drafter that is far behind, as after a prompt, reads as many tokens as a step has left, with the first round
        of the others, and drafts once it has read all.
     4. Where the caches of drafts are full, the request that needs more gives its own back and goes on without drafts;
        it drafts again, reading its tokens anew, once there is room for all of them. So does one that lost its pages.
     5. A drafter that fails drafts no more, and the log says so.

    Attributes:
        pools: caches of drafts.
    """

    def __init__(self, pools: DraftPools, rope_limits: Sequence[int]) -> None:
        """Draft up to the longest sequence of each RoPE variant, which a request then reads anew."""
        self.pools, self._rope_limits = pools, rope_limits

    def draft(self, requests: Sequence[Request], room: int) -> None:
        """Set the draft of each request that wants one, at most `room` tokens in all."""
        wanted = []
        for request in requests:
            sequence = request.sequence
            count = request.draft_count(min(room, self._rope_limits[sequence.variant] - len(sequence.tokens)))
            if count:
                wanted.append((request, count))
                room -= count
        rounds = _rounds([count for request, count in wanted if request.shares_rounds])
        budget = ReadingBudget(max(1, room))
        drafts = run_together(
            [
                request.drafting(request.draft_count(min(count, rounds)) if request.shares_rounds else count, budget)
                for request, count in wanted
            ]
        )
        for (request, _), draft in zip(wanted, drafts, strict=True):
            if isinstance(draft, OrtolanError):
                self.stop(request, draft)
            else:
                request.sequence.draft = tuple(draft)

    def reader(self, request: Request) -> HiddenReader | None:
        """Return what takes the hidden states of a request; where it cannot be made, nobody drafts."""
        try:
            return None if request.speculator is None else request.speculator.open_reader()
        except OrtolanError as error:
            self.stop(request, error)
            return None

    def stop(self, request: Request, error: OrtolanError) -> None:
        """Draft no more for a request."""
        _log.warning("request %d goes on without drafts: %s", request.sequence.number, error)
        if request.speculator is not None:
            request.speculator.close()
        request.speculator = None


def _rounds(counts: Sequence[int]) -> int:
    """Return how many rounds enough of some requests want, each of which wants as many as said."""
    return sorted(counts, reverse=True)[-(-len(counts) // ROUND_PART) - 1] if counts else 0
