"""A session whose caches and decode loop live on a CUDA device.

Reading a prompt enqueues its chunks back to back; generating enqueues steps and choices ahead of the tokens that the
caller has taken, at most `STEPS_AHEAD`, so that the device never waits for Python. A token counts as read once the
step that feeds it is known to be sound; steps past that are forgotten by their lengths alone, as a rewind does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import OrtolanError
from ortolan.manifest import Manifest
from ortolan.policies import Eviction
from ortolan.runtime.cuda import CudaBuffers
from ortolan.runtime.cuda_stepper import CudaStepper
from ortolan.runtime.device_loop import TokenChooser
from ortolan.runtime.evictor import bind_eviction
from ortolan.runtime.fingerprint import Fingerprint
from ortolan.runtime.generating import NO_TOKENS
from ortolan.runtime.memory import MemoryReport
from ortolan.runtime.plan import STEPS_AHEAD, CachePlan, split_chunks
from ortolan.runtime.sampler import Generation
from ortolan.runtime.session import Session
from ortolan.runtime.session_state import SessionState
from ortolan.runtime.stepper import Logits

CHUNKS_AHEAD = 2  # chunks enqueued before the first of them is waited for
BAD = -1  # in place of a token: the logits are no numbers


@dataclass(slots=True)
class Chunk:
    """A chunk under way."""

    tokens: npt.NDArray[np.int64]
    slot: Slot
    failure: OrtolanError | None = None


@dataclass(slots=True)
class Slot:
    """Where one choice arrives, and the events around the work that leads to it."""

    produced: npt.NDArray[np.int32]  # [1], pinned
    begin: Any
    end: Any
    is_step: bool = False  # whether a step comes before the choice


class DeviceModel:
    """What the sessions of one model share on a device."""

    def __init__(self, buffers: CudaBuffers, graph_ids: Iterator[int], free_before: int, weights_bytes: int) -> None:
        self.buffers, self.graph_ids = buffers, graph_ids
        self.weights_bytes = weights_bytes
        self._free_before = free_before

    @property
    def name(self) -> str:
        """The device's name."""
        return f"cuda:{self.buffers.device_id}"

    def free_memory(self) -> tuple[int, int]:
        """Give back what no array uses; return the device's free and all bytes."""
        self.buffers.trim()
        return self.buffers.memory()

    def used_bytes(self) -> int:
        """Device memory taken since the model began to open; other programs on the device blur it."""
        return max(0, self._free_before - self.buffers.memory()[0])

    def arena_bytes(self) -> int:
        """Device memory that is neither weights nor buffers of sessions."""
        return max(0, self.used_bytes() - self.weights_bytes - self.buffers.pool_bytes)


class DeviceSession(Session):
    """Reads and continues one sequence on a CUDA device. Made by `Model.session`; not thread-safe.

    May move between threads, one at a time; its first decode step on each captures the CUDA graph there.
    """

    def __init__(
        self,
        manifest: Manifest,
        ort_session: Any,
        plan: CachePlan,
        snapkv: Eviction | None,
        evict_session: Any,
        model: DeviceModel,
        identify: Callable[[], Fingerprint] | None = None,
        capacities: Sequence[int] | None = None,
    ) -> None:
        self._model, self._device = model, model.buffers
        super().__init__(
            manifest,
            ort_session,
            plan,
            snapkv,
            evict_session,
            buffers=model.buffers,
            weights_bytes=model.weights_bytes,
            identify=identify,
            capacities=capacities,
        )
        self._chooser = TokenChooser(self._device, self._stepper.logits, self._stepper.state)
        self._slots = [self._make_slot() for _ in range(max(STEPS_AHEAD, CHUNKS_AHEAD) + 2)]
        self._waiting: deque[Slot] = deque()  # choices enqueued by the generation under way, not taken yet

    def memory_report(self) -> MemoryReport:
        """Say what holds how many bytes now: weights, caches, captured queries, buffers of steps, and the rest."""
        free, total = self._device.memory()
        parts = {
            "weights_bytes": self._weights_bytes,
            "cache_bytes": self.cache_bytes,
            "free_page_bytes": self._caches.free_bytes,
            "capture_bytes": self._caches.capture_bytes,
            "step_bytes": self._stepper.bytes + self._chooser.bytes,
        }
        own = sum(parts.values()) - self._weights_bytes
        parts["other_session_bytes"] = max(0, self._device.pool_bytes - own)
        parts["arena_bytes"] = self._model.arena_bytes()
        return MemoryReport(
            device=self._model.name,
            planned_cache_bytes=self.plan.bytes,
            used_bytes=sum(parts.values()),
            free_bytes=free,
            total_bytes=total,
            **parts,
        )

    def _make_stepper(self, ort_session: Any) -> CudaStepper:
        return CudaStepper(ort_session, self._manifest, self._caches, self._model.graph_ids)

    def _make_slot(self) -> Slot:
        return Slot(self._device.pinned((1,), np.int32), self._device.event(), self._device.event())

    def _settle(self) -> None:
        """End the generation under way; steps enqueued past its last token count as written, not as read."""
        super()._settle()
        self._lengths.discard(self._steps_ahead(), self._capture_rows)
        self._waiting.clear()

    def _state(self) -> SessionState:
        """Return what there is to save; steps under way count as written, not as read."""
        state = super()._state()
        state.lengths.discard(self._steps_ahead(), self._capture_rows)
        return state

    def _adopt(self, state: SessionState) -> None:
        super()._adopt(state)
        turn = state.generation
        if turn and turn.logits is not None:
            self._device.write(self._stepper.logits, turn.logits[None])
            turn.logits = self._stepper.logits

    def _steps_ahead(self) -> int:
        return sum(slot.is_step for slot in self._waiting)

    def _fetch(self, logits: Any) -> Logits:
        result: Logits = self._device.download(logits)[0]
        return result

    def _read(self, tokens: npt.NDArray[np.int64], note: Callable[[int], object]) -> Any:
        """Run the decoder over tokens in chunks; `note` is called with the size of each that is read."""
        chunks = list(split_chunks(len(tokens), self.plan.chunk_size))
        enqueue = self._prepare(tokens, chunks)
        reading: deque[Chunk] = deque()
        try:
            for number, (begin, end) in enumerate(chunks):
                if len(reading) > CHUNKS_AHEAD:
                    self._confirm(reading, note)
                chunk = Chunk(tokens[begin:end], self._slots[number % len(self._slots)])
                reading.append(chunk)
                try:
                    enqueue(number)
                    self._chooser.check(chunk.slot.produced)
                    self._device.record(chunk.slot.end)
                except OrtolanError as error:
                    chunk.failure = error
                    break
            if self._snapkv and len(tokens) > 1 and self._is_due(sum(len(chunk.tokens) for chunk in reading)):
                bind_eviction(self._evict_session, self._caches, self._snapkv)  # while the device is at work
            while reading:
                self._confirm(reading, note)
        except BaseException:  # a failure, an interrupt, or what `note` raised: chunks under way are only written
            self._lengths.discard(sum(len(chunk.tokens) for chunk in reading), self._capture_rows)
            raise
        return self._stepper.logits

    def _prepare(self, tokens: npt.NDArray[np.int64], chunks: list[tuple[int, int]]) -> Callable[[int], None]:
        """Bring inputs to the device; returns what enqueues a chunk. One token is a decode step."""
        before = (self._lengths.logical, self._lengths.physical)
        if len(tokens) == 1:
            self._stepper.load(int(tokens[0]), before, self._variant)
            self._capture_graph()
            return lambda _: self._stepper.enqueue_step()
        prompt = self._stepper.upload(tokens, chunks, before, self._variant)
        return lambda chunk: self._stepper.enqueue_chunk(prompt, chunk)

    def _capture_graph(self) -> None:
        """Capture the decode graph where there is none, by a step that the next one repeats."""
        if self._stepper.is_captured:
            return
        start = time.perf_counter()
        self._lengths.discard(1, self._capture_rows)
        self._stepper.enqueue_step()
        self._device.synchronize()
        self.stats.graph_captures += 1
        self.stats.graph_capture_seconds += time.perf_counter() - start

    def _confirm(self, reading: deque[Chunk], note: Callable[[int], object]) -> None:
        """Wait for the first chunk under way and count it as read."""
        chunk = reading[0]
        if chunk.failure:
            raise chunk.failure
        tokens = chunk.tokens.tolist()  # while the device is at work
        self._device.wait(chunk.slot.end)
        if chunk.slot.produced[0] == BAD:
            raise self._numeric_error(len(tokens))
        reading.popleft()
        self._count(tokens)
        note(len(tokens))

    def _count(self, tokens: list[int]) -> None:
        """Count tokens as read."""
        self._lengths.discard(len(tokens), self._capture_rows)
        self._lengths.advance(len(tokens))
        self._history.extend(tokens)

    def _continue(self, turn: Generation) -> Iterator[int]:
        """Yield tokens; the device is `STEPS_AHEAD` steps further, at most."""
        first = turn.count
        while self._goes_on(turn):
            start = time.perf_counter()
            if turn.count == first:
                self._chooser.start([turn.sampling], [[*self._history, *self._pending]])
            if not self._waiting:
                self._start_chain(turn)
            if self._stepper.is_captured:  # else the first token does not wait for the capture
                self._enqueue_ahead(turn)
            token = self._take(start)
            if token in self._manifest.eos_token_ids:
                self.finish_reason = "eos"
                self._settle()
                return
            self._note_chosen(turn, token)
            yield token

    def _start_chain(self, turn: Generation) -> None:
        """Feed the pending token, if this generation has one, as `step` does; choose the next from its logits."""
        if turn.count:
            self._decode(self._with_pending(NO_TOKENS))
        turn.logits = None  # steps overwrite them
        self._stepper.load(0, (self._lengths.logical, self._lengths.physical), self._variant)
        self._choose(turn.count + 1, is_step=False)

    def _enqueue_ahead(self, turn: Generation) -> None:
        """Enqueue the steps that lead to the tokens after the one that is waited for."""
        longest, count = self._longest_chain(), turn.count + 1
        for number in range(count + len(self._waiting), min(count + STEPS_AHEAD, turn.max_new_tokens) + 1):
            if self.logical_length + self._steps_ahead() + 1 > longest:
                return
            self._choose(number, is_step=True)

    def _longest_chain(self) -> int:
        """Return the logical length up to which steps can follow one another without a change of caches or RoPE."""
        lengths = self._lengths
        limits = [self.plan.max_context, self._manifest.rope_limits[self._variant]]
        return min(*limits, lengths.logical + min(self._rooms(), default=self.plan.max_context))

    def _choose(self, number: int, *, is_step: bool) -> None:
        """Enqueue the choice of the generation's token `number`, after the step that it needs."""
        slot = self._slots[number % len(self._slots)]
        slot.is_step = is_step
        self._waiting.append(slot)
        try:
            self._device.record(slot.begin)
            if is_step:
                self._stepper.enqueue_step()
            self._chooser.choose(slot.produced, draw=number - 1, advance_tokens=int(is_step))
            self._device.record(slot.end)
        except OrtolanError:
            self._settle()
            raise

    def _take(self, start: float) -> int:
        """Wait for the next token; the one before it, which its step fed, is read then."""
        slot = self._waiting[0]
        try:
            self._device.wait(slot.end)
            token = int(slot.produced[0])
            if token == BAD:
                raise self._numeric_error(int(slot.is_step))
        except OrtolanError:
            self._settle()
            raise
        self._waiting.popleft()
        if slot.is_step:
            self._count(self._pending)
            self._pending.clear()
            device_seconds = self._device.seconds_between(slot.begin, slot.end)
            self.stats.decode_tokens += 1
            self.stats.decode_device_seconds += device_seconds
            self.stats.decode_seconds += max(device_seconds, time.perf_counter() - start)
        return token
