"""One request of an engine: its tokens, how the next is chosen, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortolan.runtime.engine.sequence import TokenSequence
from ortolan.runtime.engine.stream import Outbox
from ortolan.runtime.generate.draw import Draw
from ortolan.runtime.generate.logprobs import TokenLogprobs
from ortolan.runtime.generate.turn import Turn
from ortolan.runtime.saved.reader import SavedSequence
from ortolan.runtime.speculation.drafter import Speculator
from ortolan.runtime.speculation.packed import ReadingBudget
from ortolan.runtime.steps.together import Work


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What an engine knows of a request besides its pages.

    Attributes:
        sequence: its tokens.
        turn: how the next is chosen, and when to stop.
        max_context: longest sequence.
        outbox: where tokens go.
        saved: the file that its caches come from; None: from its tokens, or they are filled.
        speculator: drafts its tokens; None: nobody does.
    """

    sequence: TokenSequence
    turn: Turn
    max_context: int
    outbox: Outbox
    saved: SavedSequence | None = None
    speculator: Speculator | None = None

    @property
    def has_penalty(self) -> bool:
        """Whether the choice of a token depends on all tokens before."""
        return self.turn.sampling.repetition_penalty != 1.0

    def draws(self, position: int, draft: Sequence[int]) -> list[Draw]:
        """Say how the token at a position of the sequence is chosen, and those after each token of a draft."""
        return self.turn.draws(self.sequence.tokens, position, draft)

    def wants_to_draft(self, known: int) -> bool:
        """Say whether the next step may check a draft, so that what follows `known` tokens is to be waited for."""
        return self.speculator is not None and self.speculator.wants_to_draft(self.sequence.tokens, known)

    @property
    def shares_rounds(self) -> bool:
        """Whether its drafts are made by a graph that others may share."""
        return self.speculator is not None and self.speculator.shares_rounds

    def draft_count(self, room: int) -> int:
        """Return how many tokens to draft behind those of the sequence, at most `room`; 0: none."""
        sequence, turn = self.sequence, self.turn
        most = min(room, sequence.max_length - len(sequence.tokens), turn.max_new_tokens - turn.count - 1)
        return 0 if self.speculator is None or most < 1 else self.speculator.draft_count(most)

    def drafting(self, count: int, budget: ReadingBudget) -> Work[list[int]]:
        """Draft as many tokens as `draft_count` said, or fewer; see `Speculator.drafting`."""
        assert self.speculator is not None
        return self.speculator.drafting(self.sequence.tokens, count, self.turn.sampling, budget)

    def close_drafter(self) -> None:
        """Give back what a drafter holds, until it drafts again."""
        if self.speculator is not None:
            self.speculator.close()

    def accept(self, token: int, length: int, logprobs: TokenLogprobs | None) -> bool:
        """Take the token that makes the sequence `length` long, and hand on what may be seen; True: it was the last."""
        shown = self.turn.accept(token, length, self.max_context, logprobs)
        self.outbox.put(shown, self.turn.stop_text)
        if self.turn.finish_reason is None:
            return False
        self.outbox.finish(self.turn.finish_reason)
        return True

    def close(self) -> None:
        """Let the file go, and what a drafter holds."""
        self.close_drafter()
        if self.saved is not None:
            self.saved.close()
            self.saved = None
