"""The tokens that a session generates, one after another, as its caller takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ortolan.errors import ConfigError
from ortolan.runtime.generate.chain import Chain, Chosen
from ortolan.runtime.generate.logprobs import TokenLogprobs
from ortolan.runtime.generate.turn import Shown, Turn
from ortolan.runtime.state.sequence import SequenceState


class Owner(Protocol):
    """Who a generation belongs to.

    Attributes:
        generation: the one that was started last, as long as nothing else used the session.
        finish_reason: why it ended.
    """

    generation: Generation | None
    finish_reason: str | None


class Generation(Iterator[int]):
    """An iterator over the token ids that follow a prompt. Made by `Session.generate` and `Session.resume`.

    Attributes:
        turn: its rules, and how far it is.
        tokens: all that were yielded.
        logprobs: of each of them, where they were asked for.
    """

    def __init__(
        self, owner: Owner, state: SequenceState, chain: Chain, turn: Turn, chosen: Chosen | None, max_context: int
    ) -> None:
        self.turn, self.tokens = turn, list[int]()
        self.logprobs: list[TokenLogprobs] = []
        self._owner, self._state, self._chain, self._max_context = owner, state, chain, max_context
        self._chosen = chosen  # before anything is known of it; None: the chain has the next
        self._ready: deque[Shown] = deque()

    @property
    def text(self) -> str | None:
        """The text of the tokens, and of what comes before a stop text in its first token; None: no stop is a text."""
        return self.turn.text

    @property
    def finish_reason(self) -> str | None:
        """Why the tokens ended: "eos", "stop", "length" or "context"; None while there are more to take."""
        return None if self._ready else self.turn.finish_reason

    @property
    def can_go_on(self) -> bool:
        """Whether all that the next token depends on is still there."""
        return self.turn.can_go_on and (self._chosen is not None or bool(self._state.pending))

    def __next__(self) -> int:
        if self._owner.generation is not self:
            if self.finish_reason is not None:  # it was taken to its end
                raise StopIteration
            raise ConfigError("the session was used otherwise since the last token; start a new generate")
        while not self._ready:
            if self.turn.finish_reason is not None:
                self._owner.finish_reason = self.turn.finish_reason
                if not self.turn.can_go_on:
                    self._owner.generation = None
                raise StopIteration
            self._advance()
        shown = self._ready.popleft()
        self.tokens.append(shown.token)
        if shown.logprobs is not None:
            self.logprobs.append(shown.logprobs)
        return shown.token

    def describe(self) -> dict[str, Any]:
        """Return all that the next tokens depend on besides the sequence, as JSON holds it."""
        chosen = None if self._chosen is None else Shown(*self._chosen).as_list()
        return {"turn": self.turn.describe(), "chosen": chosen, "ready": [each.as_list() for each in self._ready]}

    def take_up(self, other: Generation) -> None:
        """Take over what another one of the same turn had chosen and not yielded."""
        self._chosen, self._ready = other._chosen, other._ready

    def take_description(self, described: Mapping[str, Any]) -> None:
        """Take over what `describe` said. Raises ContractMismatchError where it did not say it."""
        if described["chosen"] is not None:
            self._chosen = Shown.from_list(described["chosen"])
        self._ready = deque(Shown.from_list(each) for each in described["ready"])

    def _advance(self) -> None:
        """Get one more token chosen, and let the device go on meanwhile."""
        token, logprobs = self._chosen or self._chain.next(self.turn)
        self._chosen = None
        shown = self.turn.accept(token, self._state.fed + 1, self._max_context, logprobs)
        self._ready.extend(shown)
        if self.turn.can_go_on:
            self._state.tokens.append(token)
        if self.turn.finish_reason is None:
            self._chain.fill(self.turn)
        elif not self.turn.can_go_on:
            self._chain.settle()
