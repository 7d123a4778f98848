"""One request's tokens, and how many of them its pages hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortolan.contract import RECENT_TOKENS
from ortolan.policies import Eviction
from ortolan.runtime.caches.pages import DigestChain
from ortolan.runtime.caches.plan import KindPlan
from ortolan.runtime.engine.rereading import Rereading
from ortolan.runtime.state.sequence import SequenceState
from ortolan.runtime.steps.cuts import Cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A copy of what is written over, on its way to the prefix index.

    Attributes:
        length: tokens that were read.
        pages: of each kind of rings and states, which the copy is made to.
    """

    length: int
    pages: dict[str, list[int]]


@dataclass(slots=True, eq=False, kw_only=True)
class TokenSequence(SequenceState):
    """What the scheduler knows of a request.

    Attributes:
        number: order of arrival.
        prompt_length: tokens of the prompt; its end is where an eviction is due.
        max_length: most tokens that will ever be fed.
        eviction: after the prompt; None never evicts.
        reread_room: tokens behind the prompt that its eviction's second reading takes; 0: there is none.
        rereading: the second reading under way: nothing else is fed until it is done; None: none is.
        is_stored: whether a file holds what was read, and its pages are still to be filled with it.
        is_unrepeatable: whether reading its tokens anew would give other caches: a file held them after an eviction,
            or where not each token may be read in any piece.
        has_restarted: whether it reads its tokens anew since a step failed that it shared with others.
        draft: tokens that may follow the known ones, which the next step checks.
        was_sought: whether an archive was asked for its beginning since it waits.
        chain: digests of its pages.
        offered_pages: how many of its pages were offered to other sequences.
        marks: lengths at which snapshots are wanted, ascending.
        snapshot_at: length of the last snapshot, or of the one that the sequence began with.
        snapshot: to be filled behind the chunk that ends there; None: none is under way.
        resumes: pages of each kind of rings and states that are to be copied to the sequence's before it reads on.
    """

    number: int
    prompt_length: int
    max_length: int
    eviction: Eviction | None = None
    reread_room: int = 0
    rereading: Rereading | None = None
    is_stored: bool = False
    is_unrepeatable: bool = False
    has_restarted: bool = False
    draft: tuple[int, ...] = ()
    was_sought: bool = False
    chain: DigestChain = field(default_factory=DigestChain)
    offered_pages: int = 0
    marks: tuple[int, ...] = ()
    snapshot_at: int = 0
    snapshot: Snapshot | None = None
    resumes: dict[str, list[int]] = field(default_factory=dict)

    @property
    def needs_one(self) -> bool:
        """Whether a single token is all there is to feed, now."""
        return len(self.tokens) - self.fed == 1 and self.rereading is None

    @property
    def may_restart(self) -> bool:
        """Whether its tokens may be read anew after a step that failed."""
        return not (self.is_unrepeatable or self.has_restarted)

    @property
    def evicted_at(self) -> int:
        """Logical length at the eviction; 0 before it."""
        return self.lengths.evicted_at

    @property
    def will_evict(self) -> bool:
        """Whether the prompt is still to be evicted."""
        lengths, options = self.lengths, self.eviction
        if options is None or lengths.logical >= self.prompt_length:
            return False
        reading = options.second_reading  # of all tokens, so only enough of new ones are worth it
        if reading and lengths.evicted_at and self.prompt_length - lengths.evicted_at < reading.piece_tokens:
            return False
        return lengths.most_held + self.prompt_length - lengths.logical > options.budget

    def slots_at(self, kind: KindPlan, length: int) -> int:
        """Return the slots that `length` fed tokens take in a kind of caches, if none of them wraps."""
        if not kind.grows:
            return length
        return self.lengths.most_held + length - self.lengths.logical

    def most_pages(self, kind: KindPlan) -> int:
        """Return the most pages of a kind that the sequence can need from now on."""
        return max(self._pages_until(kind, self.max_length), self._pages_to_reread(kind))

    def known_pages(self, kind: KindPlan) -> int:
        """Return the most pages of a kind that it takes to feed all known tokens, at most `most_pages`."""
        known = self._pages_until(kind, min(len(self.tokens), self.max_length))
        return max(known, self._pages_to_reread(kind))

    def _pages_to_reread(self, kind: KindPlan) -> int:
        """Return the pages of a kind in use while the prompt is read again; 0 where that is over, or never is."""
        if not self.reread_room or not (self.will_evict or self.rereading):
            return 0
        return kind.pages_for(self.slots_at(kind, self.prompt_length + self.reread_room))

    def _pages_until(self, kind: KindPlan, length: int) -> int:
        """Return the most pages of a kind in use until `length` tokens are fed, the eviction between them included."""
        options = self.eviction
        if not kind.grows or options is None or not self.will_evict or options.keeps_uneven:
            return kind.pages_for(self.slots_at(kind, length))
        if length <= self.prompt_length:
            return kind.pages_for(self.slots_at(kind, length))
        later = options.budget + length - self.prompt_length
        return max(kind.pages_for(self.slots_at(kind, self.prompt_length)), kind.pages_for(later))

    def chunk_end(self, room: int, cuts: Cuts) -> int:
        """Return where a chunk of at most `room` tokens ends; an eviction comes between chunks."""
        last = min(len(self.tokens), self.max_length)
        if self.will_evict:
            last = min(last, self.prompt_length)
        return self.fed + cuts.piece(fed=self.fed, prompt=self.prompt_length, known=last, room=room)

    def moves_state(self, end: int) -> bool:
        """Say whether a chunk up to `end` moves recurrent states for good, from where nothing else holds them."""
        begins = not self.fed or self.is_stored or bool(self.resumes)
        return end - self.fed > RECENT_TOKENS and not begins

    def captures_before(self, end: int) -> bool:
        """Say whether a chunk up to `end` holds queries that score the prompt."""
        options = self.eviction
        return options is not None and self.will_evict and end > self.prompt_length - options.captured_queries

    def evicts_at(self, end: int) -> bool:
        """Say whether an eviction follows a chunk up to `end`."""
        return self.will_evict and end == self.prompt_length

    def start_over(self) -> None:
        """Forget what pages held; the tokens stay."""
        self.pages = {}
        self.rereading = None
        self.lengths.clear()
        self.is_stored = self.was_sought = False
        self.draft = ()
        self.snapshot_at = self.offered_pages = 0
