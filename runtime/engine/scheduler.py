"""Decides what each step of an engine feeds: whose tokens, into which pages, and who waits.

Rules, in order:
 1. Every running sequence that needs one token gets it, so that no prompt delays a decode by more than a chunk. Its
    draft is fed with it where there are pages for it that nobody has to give back.
 2. What is left of `chunk_tokens` goes to prompts under way, the oldest first, then to waiting ones in their order.
    A prompt that is read again takes a piece of that, which is not cut; its sequence generates once it has evicted.
 3. A waiting sequence is admitted when the pages that it may ever need are free beyond those promised to the admitted
    ones; so whoever is admitted can finish. Nobody overtakes the first that waits.
 4. With `overcommit` above 1, promises may exceed the pool by that factor. When pages then run out, the youngest
    admitted sequence gives its pages back and waits again, before all younger ones; later it reads its tokens anew.
    One that cannot be read anew, as it was restored after an eviction, is never made to wait again, and is admitted
    without that factor.

Nothing here runs a model, reads a clock or draws a number: equal calls give equal steps.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from ortolan.errors import CapacityError
from ortolan.runtime.caches.plan import CachePlan, rope_variant
from ortolan.runtime.engine.prefixes import Prefix, Prefixes
from ortolan.runtime.engine.sequence import TokenSequence

PENDING = -1  # in place of a token that the device has chosen and the host not seen yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens of one sequence that a step feeds.

    Attributes:
        sequence: whose.
        begin, end: half-open range of its tokens.
        draft: tokens fed behind them, which may be right.
        samples: whether the token after them is not known yet, so that the logits choose it.
        captures: whether their queries are needed to evict.
        evicts: whether the sequence evicts after them.
        moves_state: whether they cannot be fed again after a step that failed, which may have moved recurrent states.
        is_alone: whether no others are run with them: what they capture is theirs, or a failure would end the sequence.
        rereads: whether the sequence reads a piece of its prompt again instead, behind its end; the range is empty.
    """

    sequence: TokenSequence
    begin: int
    end: int
    samples: bool
    captures: bool
    evicts: bool
    moves_state: bool
    is_alone: bool
    draft: tuple[int, ...] = ()
    rereads: bool = False


class Scheduler:
    """Holds the page pools and all unfinished sequences.

    Attributes:
        prefixes: what the pools hold of beginnings.
        pools: pages of each kind.
        preemptions: how often a sequence gave its pages back.
        reused_tokens: tokens of prompts that were not read because pages held them already.
    """

    def __init__(self, plan: CachePlan, overcommit: float = 1.0) -> None:
        self.plan = plan
        self.preemptions = 0
        self.reused_tokens = 0
        self._overcommit = overcommit
        self.prefixes = Prefixes(plan)
        self.pools = self.prefixes.pools
        self._waiting: list[TokenSequence] = []  # by number
        self._admitted: list[TokenSequence] = []  # by number

    @property
    def waiting(self) -> tuple[TokenSequence, ...]:
        """Sequences without pages, in their order."""
        return tuple(self._waiting)

    @property
    def admitted(self) -> tuple[TokenSequence, ...]:
        """Sequences that read or decode, in their order."""
        return tuple(self._admitted)

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that sequences hold."""
        return sum(self.pools[kind.name].held * kind.page_bytes for kind in self.plan.kinds)

    def add(self, sequence: TokenSequence) -> None:
        """Let a sequence wait. Raises as `check_fits`."""
        check_fits(self.plan, sequence)
        insort(self._waiting, sequence, key=_number)

    def remove(self, sequence: TokenSequence) -> None:
        """Forget a sequence, wherever it is, and release its pages."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._admitted:
            self._admitted.remove(sequence)
        self.prefixes.release(sequence)

    def restart(self, sequence: TokenSequence) -> None:
        """Take an admitted sequence's pages away and let it wait, to read all its tokens anew."""
        self._admitted.remove(sequence)
        self.prefixes.release(sequence)
        sequence.start_over()
        insort(self._waiting, sequence, key=_number)

    def next_step(self) -> tuple[Chunk, ...]:
        """Choose what the next step feeds, and give its tokens their pages; empty where nothing can run."""
        self._restart_where_rope_changes()
        chunks: dict[TokenSequence, Chunk] = {}
        preempted = self.preemptions
        for sequence in [s for s in self._admitted if s.needs_one]:
            self._plan_chunk(chunks, sequence, 1)
        drafted = sum(len(chunk.draft) for chunk in chunks.values())
        room = max(1, self.plan.chunk_size - len(chunks) - drafted)
        for sequence in [s for s in self._admitted if not s.needs_one]:
            room = max(0, room - self._plan_chunk(chunks, sequence, room))
        while room > 0 and self._waiting and preempted == self.preemptions and self._admit(self._waiting[0]):
            room -= self._plan_chunk(chunks, self._admitted[-1], room)
        for chunk in chunks.values():
            self.prefixes.plan_snapshot(chunk.sequence, chunk.end, self._admitted)
        return tuple(chunks.values())

    def candidates(self) -> list[TokenSequence]:
        """Return the waiting sequences that the next step could admit, for what an archive knows of them."""
        found = self._waiting[: self.plan.max_sequences - len(self._admitted)]
        for sequence in found:
            self._choose_variant(sequence)
        return found

    def advance(self, chunks: tuple[Chunk, ...]) -> None:
        """Take note that a step was run, or is under way."""
        for chunk in chunks:
            chunk.sequence.lengths.advance(chunk.end - chunk.sequence.fed)

    def release_evicted(self, sequence: TokenSequence) -> None:
        """Release the pages past what an eviction has left of a sequence."""
        for kind in self.plan.kinds:
            pages = sequence.pages[kind.name]
            while len(pages) > kind.pages_for(sequence.slots_at(kind, sequence.fed)):
                self.pools[kind.name].release(pages.pop())

    def _plan_chunk(self, chunks: dict[TokenSequence, Chunk], sequence: TokenSequence, room: int) -> int:
        """Add at most `room` tokens of a sequence to the step; returns their number."""
        if sequence not in self._admitted:  # gave way to an older one in this step
            return 0
        if sequence.rereading is not None:
            return self._plan_piece(chunks, sequence, room)
        end = self.prefixes.chunk_end(sequence, sequence.chunk_end(room, self.plan.cuts))
        if end <= sequence.fed or not self._provide_pages(chunks, sequence, end):
            return 0
        samples, captures = end == len(sequence.tokens), sequence.captures_before(end)
        moves_state = self.plan.has_states and sequence.moves_state(end)
        chunks[sequence] = Chunk(
            sequence=sequence,
            begin=sequence.fed,
            end=end,
            samples=samples,
            captures=captures,
            evicts=sequence.evicts_at(end),
            moves_state=moves_state,
            is_alone=captures or (moves_state and not sequence.may_restart),
            draft=self._fitting_draft(chunks, sequence, end) if samples else (),
        )
        return end - sequence.fed

    def _plan_piece(self, chunks: dict[TokenSequence, Chunk], sequence: TokenSequence, room: int) -> int:
        """Let a sequence read a piece of its prompt again; returns the piece's tokens.

        A piece is not cut, as it shapes what is kept: the first of a step is read even where there is too little room.
        """
        assert sequence.rereading is not None
        count = sequence.rereading.next.length
        if count > room and any(not chunk.sequence.needs_one for chunk in chunks.values()):
            return 0
        fed = sequence.fed
        if not self._provide_pages(chunks, sequence, fed + sequence.reread_room):
            return 0
        chunks[sequence] = Chunk(
            sequence=sequence,
            begin=fed,
            end=fed,
            samples=False,
            captures=True,
            evicts=sequence.rereading.is_last,
            moves_state=False,
            is_alone=True,
            rereads=True,
        )
        return count

    def _fitting_draft(
        self, chunks: dict[TokenSequence, Chunk], sequence: TokenSequence, length: int
    ) -> tuple[int, ...]:
        """Return a sequence's draft behind `length` tokens, with its pages; nothing where it would take another's."""
        length += len(sequence.draft)
        for kind in self.plan.kinds:
            missing = kind.pages_for(sequence.slots_at(kind, length)) - len(sequence.pages[kind.name])
            if missing > self.pools[kind.name].available:
                return ()
        self._provide_pages(chunks, sequence, length)
        return sequence.draft

    def _provide_pages(self, chunks: dict[TokenSequence, Chunk], sequence: TokenSequence, length: int) -> bool:
        """Give a sequence the pages of `length` fed tokens; False where it had to give way itself."""
        for kind in self.plan.kinds:
            missing = kind.pages_for(sequence.slots_at(kind, length)) - len(sequence.pages[kind.name])
            if missing <= 0:
                continue
            pool = self.pools[kind.name]
            while pool.available < missing:
                youngest = next(s for s in reversed(self._admitted) if not s.is_unrepeatable)
                chunks.pop(youngest, None)
                self.restart(youngest)
                self.preemptions += 1
                if youngest is sequence:
                    return False
            sequence.pages[kind.name] += [pool.take() for _ in range(missing)]
        return True

    def _admit(self, sequence: TokenSequence) -> bool:
        """Admit the first waiting sequence if the pools allow it, with the pages that already hold its beginning."""
        self._choose_variant(sequence)
        if len(self._admitted) == self.plan.max_sequences:
            return False
        prefix = self.prefixes.find(sequence)
        if not self._fits(sequence, prefix):
            prefix = Prefix()  # which needs no pages for a snapshot and its copy at once
            if not self._fits(sequence, prefix):
                return False
        self._waiting.remove(sequence)
        insort(self._admitted, sequence, key=_number)
        sequence.pages = {kind.name: [] for kind in self.plan.kinds}
        if sequence.is_stored:
            for kind in self.plan.kinds:
                count = kind.pages_for(sequence.slots_at(kind, sequence.fed))
                sequence.pages[kind.name] += [self.pools[kind.name].take() for _ in range(count)]
        self.prefixes.begin(sequence, prefix)
        self.reused_tokens += prefix.length
        return True

    def _fits(self, sequence: TokenSequence, prefix: Prefix) -> bool:
        """Say whether a waiting sequence can be promised all its pages, and given those of its known tokens."""
        for kind in self.plan.kinds:
            pool, shared = self.pools[kind.name], prefix.shared.get(kind.name, ())
            used = (*shared, *prefix.copied.get(kind.name, ()))
            free = pool.available - sum(not pool.holders(page) for page in used)
            credit = (self._overcommit - 1.0) * pool.num_pages  # may be infinite
            if sequence.is_unrepeatable:
                credit = 0.0
            if self.prefixes.promised(kind, self._admitted) + sequence.most_pages(kind) - len(shared) > free + credit:
                return False
            if sequence.known_pages(kind) - len(shared) > free:
                return False
        return True

    def _restart_where_rope_changes(self) -> None:
        """Restart sequences that have outgrown their RoPE variant: all their keys are to be rotated anew."""
        if len(self.plan.rope_limits) == 1:
            return
        for sequence in [s for s in self._admitted if self._variant(s) != s.variant]:
            self.restart(sequence)

    def _choose_variant(self, sequence: TokenSequence) -> None:
        """Choose the RoPE variant of a waiting sequence; where a file holds keys of another, they are read anew."""
        variant = self._variant(sequence)
        if sequence.is_stored and variant != sequence.variant:
            sequence.start_over()
        sequence.variant = variant

    def _variant(self, sequence: TokenSequence) -> int:
        return rope_variant(self.plan.rope_limits, min(len(sequence.tokens), sequence.max_length))


def check_fits(plan: CachePlan, sequence: TokenSequence) -> None:
    """Refuse a sequence that could not finish alone.

    Raises:
        CapacityError: it may need more pages than a whole pool has, or it cannot be read anew and may have to be.
    """
    longest = plan.rope_limits[sequence.variant]
    if sequence.is_unrepeatable and sequence.max_length > longest:
        raise CapacityError(
            f"the request may need {sequence.max_length} tokens; past {longest} this model rotates all keys anew, but "
            "some were evicted before the sequence was saved; shorten the prompt or max_new_tokens"
        )
    for kind in plan.kinds:
        needed = sequence.most_pages(kind)
        if needed > kind.num_pages:
            raise CapacityError(
                f"the request may need {needed} pages of {kind.name!r} for up to {sequence.max_length} tokens, the "
                f"pool has {kind.num_pages}; shorten the prompt or max_new_tokens, or raise max_cache_bytes"
            )


def _number(sequence: TokenSequence) -> int:
    return sequence.number
