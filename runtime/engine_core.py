"""Runs the steps of an engine, one after another, in whatever thread calls it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ortolan.errors import NumericError, OrtolanError
from ortolan.runtime.batch_inputs import Row
from ortolan.runtime.batch_stepper import BAD, BatchStepper, StepResult
from ortolan.runtime.request import Request
from ortolan.runtime.scheduler import PENDING, Chunk, Scheduler
from ortolan.runtime.sequence import Sequence as TokenSequence


@dataclass(slots=True)
class EngineStats:
    """What an engine did since it was made.

    Attributes:
        steps: runs of the scheduler that fed something.
        fed_tokens: prompts' and generated ones, those read anew included.
        generated_tokens: tokens chosen.
        reused_tokens: tokens of prompts that were not read because pages held them already.
        evictions: sequences evicted.
        preemptions: times a sequence gave its pages back for an older one.
        most_running: most requests that had pages at once.
        finished, failed: requests that ended by themselves, and by an error or a cancel.
    """

    steps: int = 0
    fed_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0
    evictions: int = 0
    preemptions: int = 0
    most_running: int = 0
    finished: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Ran:
    """A chunk that was run with its sequence's pages, and where its logits are."""

    chunk: Chunk
    pages: dict[str, list[int]]
    result: StepResult
    row: int


class EngineCore:
    """Owns the scheduler, the stepper and all requests; not thread-safe."""

    def __init__(self, scheduler: Scheduler, stepper: BatchStepper) -> None:
        self.scheduler, self.stepper = scheduler, stepper
        self._requests: dict[TokenSequence, Request] = {}
        self._stats = EngineStats()
        self._ahead: list[Ran] = []  # a decode step whose tokens were not taken yet: PENDING in their sequences

    @property
    def is_busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._requests)

    def stats(self) -> EngineStats:
        """Return a copy of the counters."""
        scheduler = self.scheduler
        return dataclasses.replace(
            self._stats, reused_tokens=scheduler.reused_tokens, preemptions=scheduler.preemptions
        )

    def add(self, request: Request) -> None:
        """Let a request wait; one that cannot fit fails by itself."""
        try:
            self.scheduler.add(request.sequence)
        except OrtolanError as error:
            request.outbox.fail(error)
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

        Where the stepper runs ahead, tokens of a decode step are taken once the next step is enqueued behind it.
        """
        chunks = self.scheduler.next_step()
        chained = self._continues(chunks)
        if self._ahead and not chained:
            self._take_ahead()
            chunks = tuple(chunk for chunk in chunks if chunk.sequence in self._requests)
        self._stats.steps += bool(chunks)
        self._stats.most_running = max(self._stats.most_running, len(self.scheduler.admitted))
        ran = self._run([chunk for chunk in chunks if not chunk.captures], chained=chained)
        for chunk in chunks:
            if chunk.captures:  # alone, so that nothing is captured of the others
                ran += self._run([chunk])
        before, self._ahead = self._ahead, []
        if self.stepper.runs_ahead and _is_one_decode_step(ran):
            self._advance(ran)
            for each in ran:
                each.chunk.sequence.tokens.append(PENDING)
            self._ahead = ran
        else:
            sound = [each for each in ran if self._check(each)]
            self._advance(sound)
            for each in sound:
                self._finish_chunk(each)
        for each in before:
            self._take_token(each)

    def _continues(self, chunks: Sequence[Chunk]) -> bool:
        """Say whether a step feeds exactly what the step under way chooses, into the same pages."""
        before = [(each.chunk.sequence, each.chunk.end, each.chunk.end + 1) for each in self._ahead]
        same = [(chunk.sequence, chunk.begin, chunk.end) for chunk in chunks] == before
        return bool(before) and same and all(each.chunk.sequence.pages is each.pages for each in self._ahead)

    def _take_ahead(self) -> None:
        """Wait for the step under way, and take its tokens."""
        before, self._ahead = self._ahead, []
        for each in before:
            self._take_token(each)

    def _take_token(self, ran: Ran) -> None:
        """Put the token that a step under way has chosen in its place; it may end the request."""
        if ran.chunk.sequence in self._requests and self._check(ran):
            self._accept(ran, ran.result.tokens()[ran.row])

    def _advance(self, ran: Sequence[Ran]) -> None:
        self.scheduler.advance(tuple(each.chunk for each in ran))
        self._stats.fed_tokens += sum(each.chunk.end - each.chunk.begin for each in ran)

    def _run(self, chunks: Sequence[Chunk], *, chained: bool = False) -> list[Ran]:
        """Run chunks together; where that fails, one by one, so that only those at fault fail."""
        if not chunks:
            return []
        try:
            result = self.stepper.run([self._row(chunk) for chunk in chunks], chained=chained)
        except OrtolanError as error:
            if chained:
                self._take_ahead()
            elif len(chunks) == 1:
                self._fail(self._requests[chunks[0].sequence], error)
                return []
            left = [chunk for chunk in chunks if chunk.sequence in self._requests]
            return [ran for chunk in left for ran in self._run([chunk])]
        return [Ran(chunk, chunk.sequence.pages, result, row) for row, chunk in enumerate(chunks)]

    def _row(self, chunk: Chunk) -> Row:
        sequence, request = chunk.sequence, self._requests[chunk.sequence]
        if chunk.captures and not request.captures and sequence.snapkv is not None:
            request.captures = self.stepper.make_captures(sequence.snapkv.window)
        return Row(
            tokens=sequence.tokens[chunk.begin : chunk.end],
            logical=chunk.begin,
            pages=sequence.pages,
            variant=sequence.variant,
            physical=request.physical(),
            captures=request.captures if chunk.captures else {},
            choice=request.choice if chunk.samples else None,
        )

    def _check(self, ran: Ran) -> bool:
        """Fail a request whose logits are no numbers; its pages serve nobody else."""
        if ran.result.tokens()[ran.row] != BAD:
            return True
        message = (
            f"the logits after position {ran.chunk.end - 1} hold NaN or infinity; export the model with a wider dtype"
        )
        self.scheduler.forget_prefix(ran.chunk.sequence)
        self._fail(self._requests[ran.chunk.sequence], NumericError(message))
        return False

    def _finish_chunk(self, ran: Ran) -> None:
        request = self._requests[ran.chunk.sequence]
        if ran.chunk.evicts and not self._evict(request):
            return
        if ran.chunk.samples:
            request.sequence.tokens.append(PENDING)
            self._accept(ran, ran.result.tokens()[ran.row])

    def _accept(self, ran: Ran, token: int) -> None:
        request, place = self._requests[ran.chunk.sequence], ran.chunk.end
        request.sequence.tokens[place] = token
        self._stats.generated_tokens += 1
        if request.accept(token, place + 1):
            self._remove(request)
            self._stats.finished += 1

    def _evict(self, request: Request) -> bool:
        """Evict after the prompt; returns whether the request goes on."""
        sequence = request.sequence
        assert sequence.snapkv is not None
        row = Row(tokens=(), logical=sequence.fed, pages=sequence.pages, captures=request.captures)
        try:
            request.kept = self.stepper.evict(row, sequence.snapkv)
        except OrtolanError as error:
            self._fail(request, error)
            return False
        request.captures = {}
        self.scheduler.record_eviction(sequence, max(int(kept.max()) for kept in request.kept.values()))
        self._stats.evictions += 1
        return True

    def _fail(self, request: Request, error: Exception) -> None:
        request.outbox.fail(error)
        self._remove(request)
        self._stats.failed += 1

    def _remove(self, request: Request) -> None:
        del self._requests[request.sequence]
        request.captures = {}
        self.scheduler.remove(request.sequence)


def _is_one_decode_step(ran: Sequence[Ran]) -> bool:
    """Say whether one run fed one token of each sequence and chose the next."""
    chunks = [each.chunk for each in ran]
    one_each = all(chunk.samples and not chunk.evicts and chunk.end - chunk.begin == 1 for chunk in chunks)
    return one_each and len({id(each.result) for each in ran}) == 1
