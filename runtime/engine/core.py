"""Runs the steps of an engine, one after another, in whatever thread calls it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ortolan.errors import CapacityError, ConfigError, NumericError, OrtolanError
from ortolan.runtime.caches.captures import Captures
from ortolan.runtime.engine.archive import PrefixArchive
from ortolan.runtime.engine.drafting import Drafting
from ortolan.runtime.engine.evictions import Evictions
from ortolan.runtime.engine.pool_caches import PoolCaches
from ortolan.runtime.engine.request import Request
from ortolan.runtime.engine.scheduler import PENDING, Chunk, Scheduler
from ortolan.runtime.engine.sequence import TokenSequence
from ortolan.runtime.engine.stats import EngineStats
from ortolan.runtime.speculation.drafter import count_accepted
from ortolan.runtime.speculation.pools import DraftPools
from ortolan.runtime.steps.row import NO_DRAWS, Row
from ortolan.runtime.steps.stepper import BAD, Stepper, StepResult

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ran:
    """A chunk that was run with its sequence's pages, and which of the result's rows is its first."""

    chunk: Chunk
    pages: dict[str, list[int]]
    result: StepResult
    row: int


class EngineCore:
    """Owns the scheduler, the stepper and all requests; not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        stepper: Stepper,
        pools: PoolCaches,
        drafts: DraftPools | None = None,
        archive: PrefixArchive | None = None,
    ) -> None:
        """Start without requests; `drafts` are the caches of drafts, none where nobody drafts by a graph."""
        self.scheduler, self.stepper, self.pools = scheduler, stepper, pools
        self.drafting = Drafting(drafts or DraftPools(scheduler.plan.max_context), scheduler.plan.rope_limits)
        self.archive = archive
        self._requests: dict[TokenSequence, Request] = {}
        self._stats = EngineStats()
        self._evictions = Evictions(scheduler, pools, stepper, self._stats)
        self._ahead: list[Ran] = []  # a step whose tokens were not taken yet: PENDING in their sequences

    @property
    def is_busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._requests)

    def stats(self) -> EngineStats:
        """Return a copy of the counters."""
        scheduler = self.scheduler
        return dataclasses.replace(
            self._stats,
            reused_tokens=scheduler.reused_tokens,
            snapshots=scheduler.prefixes.snapshots,
            preemptions=scheduler.preemptions,
            restored_pages=0 if self.archive is None else self.archive.restored_pages,
            drafts_without_room=self._stats.drafts_without_room + sum(map(_without_room, self._requests.values())),
        )

    def close(self) -> None:
        """Let all that steps use go; no step follows."""
        self.drafting.pools.close()
        self.stepper.close()
        if self.archive is not None:
            self.archive.close()

    def add(self, request: Request) -> None:
        """Let a request wait; one that cannot fit fails by itself."""
        try:
            self.scheduler.add(request.sequence)
        except OrtolanError as error:
            request.outbox.fail(error)
            request.close()
            self._stats.failed += 1
            return
        self._requests[request.sequence] = request

    def cancel(self, request: Request, error: Exception) -> None:
        """End a request with an error, unless it has ended."""
        if request.sequence in self._requests:
            self._fail(request, error)

    def cancel_all(self, error: Exception) -> None:
        """End all requests with an error."""
        for request in list(self._requests.values()):
            self._fail(request, error)

    def step(self) -> None:
        """Run one step of whatever can run; a failure ends only the requests that it belongs to.

        Where the stepper runs ahead, the tokens of a step are taken once the next is enqueued behind it.
        """
        self._draft()
        if self.archive is not None:
            for sequence in self.scheduler.candidates():
                self.archive.bring(sequence)
        chunks = self.scheduler.next_step()
        if not (chunks or self._ahead):
            self._fail_stuck()
        if self._ahead and not self._can_follow(chunks):
            self._take_ahead()
            chunks = tuple(chunk for chunk in chunks if chunk.sequence in self._requests)
        self._stats.steps += bool(chunks)
        self._stats.most_running = max(self._stats.most_running, len(self.scheduler.admitted))
        pieces = [chunk for chunk in chunks if chunk.rereads]
        ran = self._run([chunk for chunk in chunks if not chunk.is_alone])
        for chunk in chunks:
            if chunk.is_alone and not chunk.rereads and chunk.sequence in self._requests:
                ran += self._run([chunk])
        if self.stepper.depth and not pieces and _is_one_run(ran):
            self._advance(ran)
            for each in ran:
                if each.chunk.samples:
                    each.chunk.sequence.tokens.append(PENDING)
            before, self._ahead = self._ahead, ran
            self._take(before)
        else:
            self._take_ahead()
            self._finish(ran)
        for chunk in pieces:
            if chunk.sequence in self._requests:
                self._follow_prompt(chunk)

    def _draft(self) -> None:
        """Draft for sequences that decode, in a step of `chunk_size` tokens; what comes before a draft is known."""
        for each in self.scheduler.admitted:
            each.draft = ()
        drafting = [each for each in self.scheduler.admitted if self._requests[each].wants_to_draft(_count_known(each))]
        if self._ahead and any(each.tokens[-1] == PENDING for each in drafting):
            self._take_ahead()
            drafting = [each for each in drafting if each in self._requests]
        for each in self.scheduler.waiting:  # drafters of those that lost their pages hold none, either
            self._requests[each].close_drafter()
        plan = self.scheduler.plan
        kept = plan.cuts.least_step if plan.cuts.by_family else 0  # without it no prompt might ever be cut
        room = plan.chunk_size - kept - sum(each.needs_one for each in self.scheduler.admitted)
        self.drafting.draft([self._requests[each] for each in drafting if self._is_decoding(each)], room)

    def _is_decoding(self, sequence: TokenSequence) -> bool:
        """Say whether all that a sequence still has to feed is the token that was chosen last."""
        return sequence.needs_one and bool(self._requests[sequence].turn.count) and not sequence.is_stored

    def save(self, request: Request, path: Path) -> None:
        """Write an unfinished request to a file, between two steps.

        Raises:
            ConfigError: it has ended, has read nothing yet, or is still to be evicted after its prompt, whose captured
                queries no file holds; besides, as `Session.save`.
        """
        if self._ahead:
            self._take_ahead()
        sequence = request.sequence
        if sequence not in self._requests or not sequence.fed or not sequence.pages:
            raise ConfigError("a request can be saved while it runs; this one has ended, or still waits")
        if sequence.will_evict or sequence.rereading is not None:
            raise ConfigError("a request that evicts can be saved once its prompt is read; wait for its first token")
        self.pools.save(path, sequence, {"turn": request.turn.describe(), "chosen": None, "ready": []})

    def _can_follow(self, chunks: Sequence[Chunk]) -> bool:
        """Say whether all that a step needs is known, or on the device since the step under way."""
        if any(chunk.rereads for chunk in chunks):
            return False
        unknown = [chunk for chunk in chunks if chunk.sequence.tokens[chunk.end - 1] == PENDING]
        ahead = {each.chunk.sequence: each for each in self._ahead}
        for chunk in unknown:
            before = ahead.get(chunk.sequence)
            if before is None or before.pages is not chunk.sequence.pages:  # it gave its pages back meanwhile
                return False
            if (before.chunk.end, chunk.end) != (chunk.begin, chunk.begin + 1):
                return False
        if not unknown or not any(self._requests[chunk.sequence].has_penalty for chunk in chunks):
            return True
        # A penalty needs all tokens; the device has marked them where the same sequences go on decoding.
        same = [chunk.sequence for chunk in unknown] == list(ahead)
        one_each = all(each.chunk.end - each.chunk.begin == 1 for each in self._ahead)
        return same and one_each and len(unknown) == len(chunks)

    def _take_ahead(self) -> None:
        """Wait for the step under way, and take its tokens."""
        before, self._ahead = self._ahead, []
        self._take(before)

    def _take(self, before: Sequence[Ran]) -> None:
        """Put the tokens that a step under way has chosen in their places; they may end requests."""
        for each in before:
            each.result.tokens()  # also where nobody wants them: no more than one step may be under way
            if each.chunk.sequence in self._requests and self._check(each):
                self._offer_prefix(each)
                if each.chunk.samples:
                    self._accept(each)

    def _finish(self, ran: Sequence[Ran]) -> None:
        """Wait for a step, and do all that follows from it."""
        alive = [each for each in ran if each.chunk.sequence in self._requests]
        sound = [each for each in alive if self._check(each)]
        self._advance(sound)
        for each in sound:
            self._offer_prefix(each)
            if each.chunk.evicts and not self._follow_prompt(each.chunk):
                continue
            if each.chunk.samples:
                each.chunk.sequence.tokens.append(PENDING)
                self._accept(each)

    def _offer_prefix(self, ran: Ran) -> None:
        if ran.pages is ran.chunk.sequence.pages:  # else it gave them back meanwhile
            offered = self.scheduler.prefixes.offer(ran.chunk.sequence, ran.chunk.end)
            if self.archive is not None:
                self.archive.keep(ran.chunk.sequence, offered)

    def _advance(self, ran: Sequence[Ran]) -> None:
        self.scheduler.advance(tuple(each.chunk for each in ran))
        self._stats.fed_tokens += sum(each.chunk.end - each.chunk.begin for each in ran)

    def _run(self, chunks: Sequence[Chunk]) -> list[Ran]:
        """Run chunks together; where that fails, one by one, so that only those at fault fail."""
        if not chunks:
            return []
        try:
            rows = [self._row(chunk) for chunk in chunks]
            result = self.stepper.run(rows)
        except OrtolanError as error:
            if self._ahead:
                self._take_ahead()
            elif len(chunks) == 1:
                self._fail(self._requests[chunks[0].sequence], error)
                return []
            left = [chunk for chunk in chunks if chunk.sequence in self._requests]
            return [ran for chunk in left for ran in self._run_again(chunk, error)]
        for chunk in chunks:
            self._settle(chunk)
        begins = itertools.accumulate((len(row.draws) for row in rows), initial=0)
        return [Ran(chunk, chunk.sequence.pages, result, begin) for chunk, begin in zip(chunks, begins, strict=False)]

    def _run_again(self, chunk: Chunk, error: OrtolanError) -> list[Ran]:
        """Run a chunk of a step that failed, or read its sequence anew, but once, where that moved a state for good."""
        sequence = chunk.sequence
        if not chunk.moves_state:
            return self._run([chunk])
        if sequence.may_restart:
            sequence.has_restarted = True
            self.scheduler.restart(sequence)
        else:
            self._fail(self._requests[sequence], error)
        return []

    def _settle(self, chunk: Chunk) -> None:
        """Let go of what a chunk that was enqueued began with, and copy what is written over where that is due."""
        self.scheduler.prefixes.finish_resume(chunk.sequence)
        if chunk.sequence.is_stored:
            chunk.sequence.is_stored = False
            self._requests[chunk.sequence].close()
        snapshot = chunk.sequence.snapshot
        if snapshot is not None and snapshot.length == chunk.end:
            self.pools.copy(chunk.sequence.pages, snapshot.pages)

    def _row(self, chunk: Chunk) -> Row:
        sequence, request = chunk.sequence, self._requests[chunk.sequence]
        if chunk.captures and not sequence.captures:
            sequence.captures = self.pools.make_captures(sequence)
        if sequence.is_stored and request.saved is not None:
            self.pools.load(sequence, request.saved)
        if chunk.begin == 0:
            self.pools.begin(sequence)
        if sequence.resumes:
            self.pools.copy(sequence.resumes, sequence.pages)
        tokens = [*sequence.tokens[chunk.begin : chunk.end], *chunk.draft]
        return Row(
            tokens=tokens,
            logical=chunk.begin,
            pages=sequence.pages,
            variant=sequence.variant,
            physical=sequence.lengths.physical_at(chunk.begin),
            captures=sequence.captures if chunk.captures else {},
            draws=request.draws(chunk.end, chunk.draft) if chunk.samples else NO_DRAWS,
            logprobs=request.turn.logprobs if chunk.samples else None,
            reader=self.drafting.reader(request),
            history=sequence.tokens,
            source=self._row_ahead(sequence) if tokens[-1] == PENDING else None,
        )

    def _row_ahead(self, sequence: TokenSequence) -> int:
        return next(each.row for each in self._ahead if each.chunk.sequence is sequence)

    def _check(self, ran: Ran) -> bool:
        """Fail a request whose logits contain NaN or infinity; its pages serve nobody else."""
        if ran.result.tokens()[ran.row] != BAD:
            return True
        place = ran.chunk.end - 1
        message = f"the logits after position {place} contain NaN or infinity; export the model with a wider dtype"
        self.scheduler.prefixes.forget(ran.chunk.sequence)
        self._fail(self._requests[ran.chunk.sequence], NumericError(message))
        return False

    def _accept(self, ran: Ran) -> None:
        """Put the tokens that a chunk's logits chose in their places; they may end the request.

        A chunk without a draft has one. Behind a draft, those count that follow its right beginning.
        """
        request, draft = self._requests[ran.chunk.sequence], ran.chunk.draft
        sequence, end = request.sequence, ran.chunk.end
        chosen = ran.result.tokens()[ran.row : ran.row + 1 + len(draft)]
        accepted = count_accepted(draft, chosen)
        self._note_draft(request, len(draft), accepted)
        for place, token in enumerate(chosen[: accepted + 1], end):
            if token == BAD:  # the step that feeds the token before it will say so
                break
            if place > end:
                sequence.tokens.append(token)
                sequence.lengths.advance(1)
            sequence.tokens[place] = token
            self._stats.generated_tokens += 1
            try:
                is_last = request.accept(token, place + 1, ran.result.logprobs()[ran.row + place - end])
            except OrtolanError as error:  # its text cannot be told
                self._fail(request, error)
                return
            if is_last:
                self._remove(request)
                self._stats.finished += 1
                return
        if draft:
            sequence.lengths.discard(end + len(draft) - sequence.fed, 0)

    def _note_draft(self, request: Request, drafted: int, accepted: int) -> None:
        self._stats.drafted_tokens += drafted
        self._stats.accepted_tokens += accepted
        if request.speculator is not None and drafted:
            request.speculator.note(drafted, accepted)
        elif request.speculator is not None:
            request.speculator.skip()

    def _follow_prompt(self, chunk: Chunk) -> bool:
        """Do what a chunk asks for behind its prompt; returns whether the request goes on."""
        try:
            if chunk.rereads:
                self._evictions.read_again(chunk)
            else:
                self._evictions.end_prompt(chunk.sequence)
        except OrtolanError as error:
            self._fail(self._requests[chunk.sequence], error)
            return False
        return True

    def _fail(self, request: Request, error: Exception) -> None:
        _log.info("request %d ended: %s", request.sequence.number, error)
        request.outbox.fail(error)
        self._remove(request)
        self._stats.failed += 1

    def _fail_stuck(self) -> None:
        """Fail the request that keeps the others from running, where nothing runs: no later step would differ.

        The scheduler's rules leave no such request; one that came about all the same must not wait for ever.
        """
        left = (*self.scheduler.admitted, *self.scheduler.waiting)
        if left:
            message = "the request gets no pages although nothing else runs; raise max_cache_bytes"
            self._fail(self._requests[left[0]], CapacityError(message))

    def _remove(self, request: Request) -> None:
        del self._requests[request.sequence]
        request.sequence.captures, request.sequence.rereading = Captures(), None
        self._stats.drafts_without_room += _without_room(request)
        request.close()
        self.scheduler.remove(request.sequence)


def _without_room(request: Request) -> int:
    return 0 if request.speculator is None else request.speculator.stats.without_room


def _count_known(sequence: TokenSequence) -> int:
    """Count the tokens of a sequence that the host knows."""
    return len(sequence.tokens) - (sequence.tokens[-1] == PENDING)


def _is_one_run(ran: Sequence[Ran]) -> bool:
    """Say whether one run did all of a step, and nothing else follows from it than tokens."""
    special = any(each.chunk.captures or each.chunk.evicts or each.chunk.draft for each in ran)
    return not special and len({id(each.result) for each in ran}) == 1
