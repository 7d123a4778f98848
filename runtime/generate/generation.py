"""The tokens that a session generates, one after another, as its caller takes them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ortolan.errors import ConfigError
from ortolan.runtime.generate.chain import Chain, Chosen
from ortolan.runtime.generate.logprobs import TokenLogprobs
from ortolan.runtime.generate.turn import Shown, Turn
from ortolan.runtime.ownership import exclusive
from ortolan.runtime.speculation.drafter import SpeculationStats, Speculator


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
        speculator: drafts its tokens; None: nobody does.
        use: of the session, by one call at a time: while a token is taken, not between two of them.
    """

    def __init__(
        self, owner: Owner, chain: Chain, turn: Turn, chosen: Chosen | None, speculator: Speculator | None = None
    ) -> None:
        self.turn, self.tokens = turn, list[int]()
        self.logprobs: list[TokenLogprobs] = []
        self._owner = weakref.ref(owner)  # who lets go of both frees the caches at once; gone, it is used no more
        self._chain, self._state, self.use = chain, chain.state, chain.use
        self.speculator = chain.speculator = speculator
        self._chosen = chosen  # before anything is known of it; None: the chain has the next
        self._shown: list[Shown] = []  # `tokens` and those after them, which wait to be taken
        self._is_cut = False  # by an interrupt, between what was chosen and what may be shown of it
        self._is_closed = False

    @property
    def text(self) -> str | None:
        """The text so far, in whole characters with their spaces; None where the model has no tokenizer.

        It is that of the tokens, also of those before a `resume`, and of what comes before a stop text in its first
        token. With the last token come bytes that are not a whole character, too.
        """
        return self.turn.text

    @property
    def speculation(self) -> SpeculationStats | None:
        """What became of drafts, those before a `resume` included; None without speculation."""
        return None if self.speculator is None else self.speculator.stats

    @property
    def finish_reason(self) -> str | None:
        """Why the tokens ended, "eos", "stop", "length" or "context"; None while there are more to take."""
        return None if self._ready or self._is_cut else self.turn.finish_reason

    @property
    def can_go_on(self) -> bool:
        """Whether all that the next token depends on is still there."""
        return self.turn.can_go_on and not self._is_cut and (self._chosen is not None or bool(self._state.pending))

    def close(self) -> None:
        """Yield no more; what is left can be taken up by `Session.resume`, as after any generation left early."""
        self._is_closed = True

    @exclusive
    def __next__(self) -> int:
        if self._is_closed:
            raise StopIteration
        owner = self._owner()
        if owner is not None and owner.generation is not self:
            if self.finish_reason is not None:  # it was taken to its end
                raise StopIteration
            raise ConfigError("the session was used otherwise since the last token; start a new generate")
        while len(self._shown) == len(self.tokens):
            if self.finish_reason is not None:
                if owner is not None:
                    owner.finish_reason = self.finish_reason
                    owner.generation = self if self.turn.can_go_on else None
                raise StopIteration
            self._advance()
        count = len(self.tokens)
        shown = self._shown[count]
        if shown.logprobs is not None:
            self.logprobs[count:] = [shown.logprobs]
        self.tokens.append(shown.token)  # this alone takes it: an interrupt before or after loses nothing
        return shown.token

    def describe(self) -> dict[str, Any]:
        """Return all that the next tokens depend on besides the sequence, as JSON holds it."""
        chosen = None if self._chosen is None else Shown(*self._chosen).as_list()
        return {"turn": self.turn.describe(), "chosen": chosen, "ready": [each.as_list() for each in self._ready]}

    def take_up(self, other: Generation) -> None:
        """Take over what another one of the same turn had chosen and not yielded."""
        self._chosen, self._shown = other._chosen, other._ready

    def take_description(self, described: Mapping[str, Any]) -> None:
        """Take over what `describe` said. Raises ContractMismatchError where it did not say it."""
        if described["chosen"] is not None:
            self._chosen = Shown.from_list(described["chosen"])
        self._shown = [Shown.from_list(each) for each in described["ready"]]

    @property
    def _ready(self) -> list[Shown]:
        """Return what may be shown and was not yielded."""
        return self._shown[len(self.tokens) :]

    def _advance(self) -> None:
        """Get one more token chosen; what follows it is under way meanwhile, but for the first."""
        if not self.can_go_on:
            raise ConfigError(
                "the last step was interrupted, and the token that it chose is lost; start a new generate"
            )
        chosen = self._chosen
        if chosen is None:
            self._chain.fill(self.turn)
            chosen = self._chain.next(self.turn)
        token, logprobs = chosen
        self._is_cut, self._chosen = True, None
        self._shown += self.turn.accept(token, self._state.fed + 1, self._chain.max_context, logprobs)
        if self.turn.can_go_on:
            self._state.tokens.append(token)
        self._is_cut = False
        if not self.turn.can_go_on:
            self._chain.settle()
        elif self.speculator is not None:  # a check runs while the caller takes what the one before it has found
            self._chain.fill(self.turn)
