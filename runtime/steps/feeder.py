"""Feeds one sequence: in chunks, into caches that have room, counting what was read once it is known to be sound."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortolan.contract import RECENT_TOKENS
from ortolan.errors import CapacityError, NumericError, OrtolanError
from ortolan.manifest import Manifest
from ortolan.runtime.caches.captures import Captures
from ortolan.runtime.caches.layer_state import kind_of, own_layers
from ortolan.runtime.caches.plan import CachePlan
from ortolan.runtime.caches.room import Room
from ortolan.runtime.caches.store import SequenceCaches
from ortolan.runtime.generate.draw import Draw
from ortolan.runtime.state.lengths import Lengths
from ortolan.runtime.state.sequence import SequenceState
from ortolan.runtime.stats import Stats
from ortolan.runtime.steps.forgotten import read_and_forget
from ortolan.runtime.steps.interrupt import Interrupt
from ortolan.runtime.steps.row import HiddenReader, Row
from ortolan.runtime.steps.stepper import BAD, Stepper, StepResult

Tokens = npt.NDArray[np.int64]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is wanted of the last tokens that are fed.

    Attributes:
        draws: how the token after each of them is chosen; None: not wanted. At most as many as a chunk has tokens.
        logprobs: as in `Row`.
    """

    draws: Sequence[Draw | None] = (None,)
    logprobs: int | None = None


NOTHING = Wanted()


@dataclass(slots=True)
class _Chunk:
    """A chunk under way; `undo` takes back what its length does not, unless it counts as read."""

    tokens: list[int]
    undo: Callable[[], None]
    result: StepResult | None = None
    failure: OrtolanError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederParts:
    """What a feeder works with; `capture_rows` are those of the buffers in `state.captures`.

    Where somebody asks by `interrupt`, no further chunk is fed.
    """

    manifest: Manifest
    plan: CachePlan
    state: SequenceState
    caches: SequenceCaches
    room: Room
    stepper: Stepper
    interrupt: Interrupt
    capture_rows: int = 0


class Feeder:
    """Feeds one sequence.

    A token counts as read once the step that feeds it is known to be sound; steps past that are forgotten by their
    lengths alone, as a rewind does.
    """

    def __init__(self, parts: FeederParts, stats: Stats) -> None:
        self.manifest, self.plan, self.state, self.caches = parts.manifest, parts.plan, parts.state, parts.caches
        self.room, self.stepper, self.capture_rows = parts.room, parts.stepper, parts.capture_rows
        self.interrupt, self.stats = parts.interrupt, stats
        self.reader: HiddenReader | None = None  # of the hidden states of all steps
        own = own_layers(self.manifest)
        self._growing = [i for i in own if kind_of(self.manifest.layers[i]).grows]
        self._views = [(i, kind_of(self.manifest.layers[i])) for i in own]

    def held(self) -> dict[int, int]:
        """Return the tokens in the cache of each layer that grows; where kv heads differ, the most."""
        return {index: self.state.lengths.held(index) for index in self._growing}

    def physical_length(self, index: int) -> int:
        """Return the tokens in the cache of one layer that has its own; where kv heads differ, the most."""
        if index in self._growing:
            return self.state.lengths.held(index)
        return min(self.state.fed, self.caches.capacity(index))

    def rooms(self) -> int:
        """Return how many more tokens the caches take as they are."""
        limit = self.plan.bound or self.plan.max_context
        if self._growing and not self.state.lengths.counts:  # all hold the same
            return min(self.caches.least_capacity(), limit) - self.state.lengths.logical
        rooms = (min(self.caches.capacity(i), limit) - held for i, held in self.held().items())
        return min(rooms, default=self.plan.max_context)

    def make_room(self, count: int) -> None:
        """Grow caches for `count` more tokens: those that an eviction had shrunk, and paged ones."""
        if self.rooms() >= count:
            return
        held = self.held()
        slots = {i: self.caches.capacity(i) for i in held}
        slots |= {i: self.grown(i, n + count) for i, n in held.items() if n + count > slots[i]}
        self.room.fit(slots, held)

    def grown(self, index: int, needed: int) -> int:
        """Return the slots that a growing cache of `needed` tokens gets."""
        return max(self.plan.grown_capacity(index, needed), self.manifest.sink + 1)

    def row(self, tokens: Tokens | Sequence[int], ahead: int, wanted: Wanted, source: int | None = None) -> Row:
        """Describe a step that feeds tokens after those read and `ahead` more."""
        state = self.state
        logical = state.fed + ahead
        return Row(
            tokens=tokens,
            logical=logical,
            pages=state.pages,
            variant=state.variant,
            physical=state.lengths.physical_at(logical),
            captures=state.captures,
            draws=wanted.draws,
            logprobs=wanted.logprobs,
            reader=self.reader,
            history=state.tokens,
            source=source,
        )

    def feed(
        self,
        tokens: Tokens,
        note: Callable[[int], object],
        wanted: Wanted = NOTHING,
        meanwhile: Callable[[], object] | None = None,
    ) -> StepResult:
        """Run the decoder over tokens in chunks, into caches that have room for them.

        Args:
            tokens: [T], at least one.
            note: called with the size of each chunk that was read.
            wanted: of the last tokens.
            meanwhile: called once the last chunk is under way.

        Returns:
            The last chunk's result.
        """
        reading: deque[_Chunk] = deque()
        result: StepResult | None = None
        is_interrupted = False
        if self.state.fed == 0:
            self.caches.clear(self.state.lengths)
        try:
            for begin, end in self._chunks(len(tokens), len(wanted.draws)):
                if len(reading) > self.stepper.depth:
                    self._confirm(reading, note)
                is_interrupted = self.interrupt.is_asked
                if is_interrupted:
                    break
                is_last = end == len(tokens)
                chunk = self._enqueue(reading, tokens[begin:end], wanted if is_last else NOTHING)
                if chunk.failure:
                    break
                result = chunk.result
            if meanwhile and not is_interrupted:
                meanwhile()
            while reading:
                self._confirm(reading, note)
            if is_interrupted:
                self.interrupt.check()
        except BaseException:  # a failure, an interrupt, or what `note` raised: chunks under way are only written
            self.discard(sum(len(chunk.tokens) for chunk in reading))
            for chunk in reading:
                chunk.undo()
            raise
        assert result is not None
        return result

    def run(self, row: Row) -> StepResult:
        """Run a step of few tokens, and first capture what it replays."""
        self._capture(row)
        return self.stepper.run([row])

    def read_and_forget(self, tokens: Tokens, captures: Captures) -> None:
        """Feed tokens behind those read, in one step, and forget them again, also where that ends early.

        Args:
            tokens: [T]; caches have room for them, and rings can take back as many.
            captures: what takes their queries.

        Raises:
            NumericError: the model produced NaN or infinity.
            OrtolanError: the step failed, or was interrupted.
        """
        row = dataclasses.replace(self.row(tokens, 0, NOTHING), captures=captures, reader=None)
        read_and_forget(self.stepper, row, self.caches, self.state.lengths, self.capture_rows)

    def count(self, tokens: list[int]) -> None:
        """Count tokens as read."""
        self.discard(len(tokens))
        self.state.read(tokens)

    def discard(self, count: int) -> None:
        """Note that `count` tokens past those read were written, and do not count."""
        self.state.lengths.discard(count, self.capture_rows)

    def rewind_problem(self, length: int) -> str | None:
        """Say why the sequence cannot go back to `length` tokens; None where it can."""
        for index, kind in self._views:
            problem = kind.rewind_problem(self.caches.view(index, self.state.lengths), length)
            if problem:
                return problem
        return None

    def check_rewind(self, length: int) -> None:
        """Raise CapacityError where what position `length` looks back on is gone."""
        problem = self.rewind_problem(length)
        if problem:
            raise CapacityError(f"cannot rewind to {length}: {problem}")

    def rewind(self, length: int) -> None:
        """Forget all tokens from logical position `length` on, which `check_rewind` allows, or 0."""
        lengths = self.state.lengths
        if length == 0:
            lengths.clear()
            self.state.variant = 0
        elif length < lengths.logical:
            lengths.rewind(length, self.capture_rows, self.manifest.sink)
        del self.state.tokens[length:]
        held = self.held()
        self.room.release({i: self.grown(i, n) if length else 0 for i, n in held.items()}, held)

    def copy_from(self, other: Feeder, lengths: Lengths) -> None:
        """Go on from where another sequence stands, whose caches are as large; it has these lengths."""
        self.caches.copy_from(other.caches)
        self.state.tokens[:], self.state.variant, self.state.lengths = other.state.tokens, other.state.variant, lengths
        with self.caches.buffers.scope():
            self.state.captured_at_eviction = {i: a.copy() for i, a in other.state.captured_at_eviction.items()}

    def numeric_error(self, count: int) -> NumericError:
        """Return the error of logits that are not numbers, `count` tokens past those read."""
        return NumericError(
            f"the logits after position {self.state.fed + count - 1} contain NaN or infinity; "
            "rewind, or export the model with a wider dtype"
        )

    def _chunks(self, count: int, wanted: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of chunks; the last one holds all tokens whose logits are wanted."""
        *begins, last = [begin for begin, _ in self.plan.cuts.pieces(count, self.plan.chunk_size)]
        last = min(last, count - wanted)
        yield from itertools.pairwise([*(begin for begin in begins if begin < last), last])
        yield last, count

    def _enqueue(self, reading: deque[_Chunk], tokens: Tokens, wanted: Wanted) -> _Chunk:
        """Enqueue a chunk behind those under way."""
        ahead = sum(len(other.tokens) for other in reading)
        chunk = _Chunk(tokens.tolist(), self._undo(len(tokens)))
        reading.append(chunk)
        try:
            row = self.row(tokens, ahead, wanted)
            chunk.result = self.run(row) if len(tokens) == 1 else self.stepper.run([row])
        except OrtolanError as error:
            chunk.failure = error
        return chunk

    def _undo(self, count: int) -> Callable[[], None]:
        """Return what takes back a step of so many tokens that ends early, where its length alone does not.

        On a device, whose memory was planned without copies, it does nothing; interrupts end no step there.
        """
        lengths = self.state.lengths
        if count <= RECENT_TOKENS or self.stepper.depth or not lengths.logical:
            return _nothing_to_undo
        logical, states_from, snapshot = lengths.logical, lengths.states_from, self.caches.snapshot(lengths)

        def undo() -> None:
            if lengths.logical == logical:
                self.caches.restore(snapshot, lengths)
                lengths.states_from = states_from

        return undo

    def _capture(self, row: Row) -> None:
        seconds = self.stepper.capture(row)
        if seconds is not None:
            self.stats.graph_captures += 1
            self.stats.graph_capture_seconds += seconds

    def _confirm(self, reading: deque[_Chunk], note: Callable[[int], object]) -> None:
        """Wait for the first chunk under way and count it as read."""
        chunk = reading[0]
        if chunk.failure:
            raise chunk.failure
        assert chunk.result is not None
        if BAD in chunk.result.tokens():
            raise self.numeric_error(len(chunk.tokens))
        self.count(chunk.tokens)
        reading.popleft()  # an interrupt before it counts too many tokens as written, never too few
        if len(chunk.tokens) > 1:
            _log.debug("read %d tokens, %d in all", len(chunk.tokens), self.state.fed)
        note(len(chunk.tokens))


def _nothing_to_undo() -> None:
    """Do nothing: the length of a step is enough."""
