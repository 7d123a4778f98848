"""Knows which pages hold the beginnings of sequences, so that prompts that begin alike do not read them again.

Pages of a cache that grows are shared as they are. Rings and recurrent states are written over. A snapshot of them is a
copy in pages of the same pools, and a later sequence copies it to pages of its own. A digest of all tokens up to a
page's end identifies both. Snapshots are made:

 1. at the last whole page of the tokens that a sequence brings along, where its next turn begins;
 2. where the pages that other sequences have left end without a snapshot: prompts part there;
 3. at the ends of chunks, rounded down to a page, as long as free pages are left.

The second finds what many prompts share without knowing it: the first one leaves pages, the next a snapshot, and all
later ones begin there. A snapshot comes at least `CachePlan.snapshot_spacing` tokens after the last, so that snapshots
take no more bytes than the keys and values that they belong to. They take no page that is promised to a sequence.

Source: Marconi, arXiv 2411.19379 (states are kept where sequences part).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ortolan.runtime.caches.pages import PagePool, PrefixIndex
from ortolan.runtime.caches.plan import CachePlan, KindPlan
from ortolan.runtime.engine.sequence import Snapshot, TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """What is known of a sequence's beginning.

    Attributes:
        length: tokens that it need not read.
        shared: pages of each kind that grows, which hold them.
        copied: pages of each other kind, whose contents the sequence needs in pages of its own.
        parts_at: tokens up to which there are pages, with or without a snapshot.
    """

    length: int = 0
    shared: Mapping[str, Sequence[int]] = field(default_factory=dict)
    copied: Mapping[str, Sequence[int]] = field(default_factory=dict)
    parts_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What was offered to other sequences: the pages of a kind, and the digest of the tokens that they hold."""

    kind: str
    digest: bytes
    pages: tuple[int, ...]


class Prefixes:
    """The page pools of a plan, and the beginnings that they hold.

    Attributes:
        pools: pages of each kind.
        snapshots: how many were made.
    """

    def __init__(self, plan: CachePlan) -> None:
        self._plan = plan
        self.snapshots = 0
        self._growing = [kind for kind in plan.kinds if kind.grows]
        self._fixed = [kind for kind in plan.kinds if not kind.grows]
        self._index = {kind.name: PrefixIndex() for kind in plan.kinds} if plan.shares_prefixes else {}
        self.pools = {kind.name: PagePool(kind.name, kind.num_pages, self._index.get(kind.name)) for kind in plan.kinds}

    def find(self, sequence: TokenSequence) -> Prefix:
        """Return what is known of a waiting sequence; its last token is fed in any case, for its logits."""
        digests = self.chain(sequence)
        if not digests:
            return Prefix()
        size = self._plan.page_size
        chains = {kind.name: self._index[kind.name].find(digests) for kind in self._growing}
        known = count = min(map(len, chains.values()))
        while count and not self._may_begin(sequence, count, digests):
            count -= 1
        return Prefix(
            length=count * size,
            shared={name: pages[:count] for name, pages in chains.items()},
            copied={k.name: self._index[k.name].get(digests[count - 1]) for k in self._fixed} if count else {},
            parts_at=known * size,
        )

    def chain(self, sequence: TokenSequence) -> list[bytes]:
        """Return the digests of the whole pages that a waiting sequence could begin with; none where it may not."""
        if not self._serves(sequence) or sequence.is_stored:
            return []
        size = self._plan.page_size
        return self._digests(sequence, (len(sequence.tokens) - 1) // size)

    def offered(self, sequence: TokenSequence) -> list[bytes]:
        """Return the digests of the pages that a sequence has offered to others."""
        return self._digests(sequence, sequence.offered_pages)

    def pages_of(self, name: str, digest: bytes) -> tuple[int, ...]:
        """Return the pages of a kind that hold what a digest stands for; none where none do."""
        return self._index[name].get(digest)

    def publish(self, name: str, digest: bytes, pages: Sequence[int]) -> None:
        """Note what pages of a kind hold that were filled from elsewhere."""
        self._index[name].add(digest, *pages)

    def may_cut(self, sequence: TokenSequence, count: int) -> bool:
        """Say whether a sequence may read on behind its first `count` pages."""
        known, length = len(sequence.tokens), count * self._plan.page_size
        return self._plan.cuts.may_begin(length, prompt=sequence.prompt_length, known=known)

    def begin(self, sequence: TokenSequence, prefix: Prefix) -> None:
        """Let a sequence without pages begin with a prefix, and choose where it leaves snapshots."""
        for name, pages in prefix.shared.items():
            for page in pages:
                self.pools[name].share(page)
            sequence.pages[name] += pages
        for kind in self._fixed if prefix.length else ():
            for page in prefix.copied[kind.name]:
                self.pools[kind.name].share(page)
            sequence.resumes[kind.name] = list(prefix.copied[kind.name])
            sequence.pages[kind.name] += self._take(kind, len(prefix.copied[kind.name]))
        sequence.lengths.advance(prefix.length)
        sequence.snapshot_at = prefix.length
        size = self._plan.page_size
        last = self._plan.cuts.last_begin(prompt=sequence.prompt_length, known=len(sequence.tokens))
        sequence.marks = tuple(sorted({prefix.parts_at, last // size * size}))
        self.offer(sequence, prefix.length)

    def chunk_end(self, sequence: TokenSequence, end: int) -> int:
        """Return where a chunk that could reach to `end` ends, so that a snapshot can be made there."""
        if not self._fixed or not self._serves(sequence):
            return end
        size = self._plan.page_size
        may_end = functools.partial(self._plan.cuts.may_end, fed=sequence.fed, prompt=sequence.prompt_length)
        ends = [mark for mark in sequence.marks if sequence.fed < mark <= end and may_end(mark)] or [end // size * size]
        wanted = (each for each in ends if each > sequence.fed and may_end(each) and self._wants(sequence, each))
        return next(wanted, end)

    def plan_snapshot(self, sequence: TokenSequence, end: int, admitted: Sequence[TokenSequence]) -> None:
        """Take the pages of a snapshot behind a chunk that ends at `end`, where one is wanted and pages can be had."""
        if not self._fixed or not self._serves(sequence) or sequence.snapshot is not None:
            return
        if not self._wants(sequence, end):
            return
        for kind in self._fixed:
            if self.pools[kind.name].available - self.promised(kind, admitted) < kind.pages_for(end):
                return
        pages = {kind.name: self._take(kind, kind.pages_for(end)) for kind in self._fixed}
        sequence.snapshot, sequence.snapshot_at = Snapshot(length=end, pages=pages), end

    def promised(self, kind: KindPlan, admitted: Sequence[TokenSequence]) -> int:
        """Return the pages of a kind that admitted sequences may still take."""
        return sum(other.most_pages(kind) - len(other.pages[kind.name]) for other in admitted)

    def offer(self, sequence: TokenSequence, length: int) -> list[Offered]:
        """Offer what holds a sequence's first `length` tokens to others; these tokens were fed, and are sound.

        Eviction moves rows within its sequence's pages, so those stay private. Returns what is new.
        """
        offered: list[Offered] = []
        size, first = self._plan.page_size, sequence.offered_pages
        end = self._plan.cuts.shared(sequence.prompt_length, length) // size
        if not self._serves(sequence) or end <= first:
            return offered
        for number, digest in enumerate(self._digests(sequence, end)[first:], first):
            for kind in self._growing:
                page = sequence.pages[kind.name][number]
                self._index[kind.name].add(digest, page)
                offered.append(Offered(kind=kind.name, digest=digest, pages=(page,)))
            sequence.offered_pages += 1
            if sequence.snapshot is not None and sequence.snapshot.length == (number + 1) * size:
                for name, pages in sequence.snapshot.pages.items():
                    offered.append(Offered(kind=name, digest=digest, pages=tuple(pages)))
                    self._index[name].add(digest, *pages)
                self._drop_snapshot(sequence)
                self.snapshots += 1
        return offered

    def forget(self, sequence: TokenSequence) -> None:
        """Offer a sequence's pages to nobody: what they hold is spoiled."""
        for name, index in self._index.items():
            for page in sequence.pages.get(name, ()):
                index.forget(page)

    def finish_resume(self, sequence: TokenSequence) -> None:
        """Let the snapshot go that a sequence has begun with."""
        self._release(sequence.resumes)

    def release(self, sequence: TokenSequence) -> None:
        """Release all of a sequence's pages, the last first: of a kept prefix the end is given out first."""
        self.finish_resume(sequence)
        self._drop_snapshot(sequence)
        self._release(sequence.pages)
        sequence.pages = {}

    def _digests(self, sequence: TokenSequence, pages: int) -> list[bytes]:
        root = bytes([sequence.variant])  # keys differ between RoPE variants
        return sequence.chain.first(pages, sequence.tokens, self._plan.page_size, root)

    def _serves(self, sequence: TokenSequence) -> bool:
        is_private = sequence.eviction is not None or sequence.evicted_at or sequence.is_unrepeatable
        return bool(self._index) and not is_private

    def _may_begin(self, sequence: TokenSequence, count: int, digests: Sequence[bytes]) -> bool:
        """Say whether a sequence may begin with the first `count` pages, whose keys and values are there."""
        return self.may_cut(sequence, count) and all(
            self._index[kind.name].get(digests[count - 1]) for kind in self._fixed
        )

    def _wants(self, sequence: TokenSequence, length: int) -> bool:
        """Say whether a snapshot belongs at a length: at a mark, or before one as far as snapshots lie apart."""
        spacing = self._plan.snapshot_spacing
        later = [mark for mark in sequence.marks if mark >= length]
        if self._plan.cuts.shared(sequence.prompt_length, length) < length:
            return False
        if length % self._plan.page_size or length - sequence.snapshot_at < spacing or not later:
            return False
        if later[0] == length:
            return True
        has_room = all(self.pools[kind.name].free >= kind.pages_for(length) for kind in self._fixed)
        return later[0] - length >= spacing and has_room

    def _take(self, kind: KindPlan, count: int) -> list[int]:
        return [self.pools[kind.name].take() for _ in range(count)]

    def _drop_snapshot(self, sequence: TokenSequence) -> None:
        if sequence.snapshot is not None:
            self._release(sequence.snapshot.pages)
            sequence.snapshot = None

    def _release(self, held: dict[str, list[int]]) -> None:
        for name, pages in held.items():
            while pages:
                self.pools[name].release(pages.pop())
        held.clear()
