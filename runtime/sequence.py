"""One request's tokens, and how many of them its pages hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortolan.policies import Eviction
from ortolan.runtime.engine_plan import KindPlan


@dataclass(slots=True, eq=False, kw_only=True)
class TokenSequence:
    """What the scheduler knows of a request.

    Attributes:
        number: order of arrival.
        tokens: the prompt and what was generated, known so far.
        prompt_length: tokens of the prompt.
        max_length: most tokens that will ever be fed.
        snapkv: eviction after the prompt; None never evicts.
        fed: logical length: tokens whose keys and values were computed.
        variant: of RoPE, which the pages were computed with.
        pages: of each kind, in the order of their slots; empty while it waits.
        evicted_at: logical length at the eviction; 0 before it.
        kept_slots: most tokens that any head kept then.
        digest: of the pages that the prefix index knows.
        published: their number.
    """

    number: int
    tokens: list[int]
    prompt_length: int
    max_length: int
    snapkv: Eviction | None = None
    fed: int = 0
    variant: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)
    evicted_at: int = 0
    kept_slots: int = 0
    digest: bytes = b""
    published: int = 0

    @property
    def needs_one(self) -> bool:
        """Whether a single token is all there is to feed."""
        return len(self.tokens) - self.fed == 1

    @property
    def will_evict(self) -> bool:
        """Whether the prompt is still to be evicted."""
        return self.snapkv is not None and not self.evicted_at and self.prompt_length > self.snapkv.budget

    def slots_at(self, kind: KindPlan, length: int) -> int:
        """Return the slots that `length` fed tokens take in a kind of caches, if none of them wraps."""
        if kind.is_ring or not self.evicted_at:
            return length
        return self.kept_slots + length - self.evicted_at

    def most_pages(self, kind: KindPlan) -> int:
        """Return the most pages of a kind that the sequence can need from now on."""
        return self._pages_until(kind, self.max_length)

    def known_pages(self, kind: KindPlan) -> int:
        """Return the most pages of a kind that it takes to feed all known tokens, at most `most_pages`."""
        return self._pages_until(kind, min(len(self.tokens), self.max_length))

    def _pages_until(self, kind: KindPlan, length: int) -> int:
        """Return the most pages of a kind in use until `length` tokens are fed, the eviction between them included."""
        if kind.is_ring or not self.will_evict or self.snapkv is None:
            return kind.pages_for(self.slots_at(kind, length))
        if self.snapkv.keeps_uneven or length <= self.prompt_length:
            return kind.pages_for(length)
        later = self.snapkv.budget + length - self.prompt_length
        return max(kind.pages_for(self.prompt_length), kind.pages_for(later))

    def chunk_end(self, room: int) -> int:
        """Return where a chunk of at most `room` tokens ends; an eviction comes between chunks."""
        last = min(len(self.tokens), self.max_length)
        if self.will_evict:
            last = min(last, self.prompt_length)
        return min(self.fed + room, last)

    def captures_before(self, end: int) -> bool:
        """Say whether a chunk up to `end` holds queries that score the prompt."""
        return self.will_evict and self.snapkv is not None and end > self.prompt_length - self.snapkv.captured_queries

    def evicts_at(self, end: int) -> bool:
        """Say whether an eviction follows a chunk up to `end`."""
        return self.will_evict and end == self.prompt_length

    def record_eviction(self, kept_slots: int) -> None:
        """Take note of an eviction that left at most `kept_slots` tokens to any head."""
        self.evicted_at, self.kept_slots = self.fed, kept_slots

    def start_over(self) -> None:
        """Forget what pages held; the tokens stay."""
        self.pages = {}
        self.fed = self.evicted_at = self.kept_slots = self.published = 0
        self.digest = b""
