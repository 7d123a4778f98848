"""One request of an engine: its tokens, how the next is chosen, and where they go."""

from __future__ import annotations

from dataclasses import dataclass

from ortolan.runtime.engine.sequence import TokenSequence
from ortolan.runtime.engine.stream import Outbox
from ortolan.runtime.generate.draw import Draw
from ortolan.runtime.generate.logprobs import TokenLogprobs
from ortolan.runtime.generate.turn import Turn
from ortolan.runtime.saved.reader import SavedSequence


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What an engine knows of a request besides its pages.

    Attributes:
        sequence: its tokens.
        turn: how the next is chosen, and when to stop.
        max_context: longest sequence.
        outbox: where tokens go.
        saved: the file that its caches come from; None: from its tokens, or they are filled.
    """

    sequence: TokenSequence
    turn: Turn
    max_context: int
    outbox: Outbox
    saved: SavedSequence | None = None

    @property
    def has_penalty(self) -> bool:
        """Whether the choice of a token depends on all tokens before."""
        return self.turn.sampling.repetition_penalty != 1.0

    def draw(self, position: int) -> Draw:
        """Say how the token at a position of the sequence is chosen."""
        return self.turn.draw(position, self.sequence.tokens[:position] if self.has_penalty else ())

    def accept(self, token: int, length: int, logprobs: TokenLogprobs | None) -> bool:
        """Take the token that makes the sequence `length` long, and hand on what may be seen; True: it was the last."""
        shown = self.turn.accept(token, length, self.max_context, logprobs)
        self.outbox.put(shown, self.turn.stop_text)
        if self.turn.finish_reason is None:
            return False
        self.outbox.finish(self.turn.finish_reason)
        return True

    def close(self) -> None:
        """Let the file go."""
        if self.saved is not None:
            self.saved.close()
            self.saved = None
