"""Captured steps of one shape: their inputs at fixed addresses, their graphs, and what chooses their tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan import contract
from ortolan.manifest import Manifest
from ortolan.runtime.caches.plan import STEPS_AHEAD
from ortolan.runtime.device.buffers import Array
from ortolan.runtime.device.cuda import CudaBuffers
from ortolan.runtime.generate.device_logprobs import read_logprobs
from ortolan.runtime.generate.device_sampler import DeviceSampler
from ortolan.runtime.generate.logprobs import TokenLogprobs
from ortolan.runtime.steps.device_result import Choices, DeviceResult
from ortolan.runtime.steps.layout import HostInputs, StepLayout, StepShape
from ortolan.runtime.steps.row import Row
from ortolan.runtime.steps.together import hand_on_hidden

NO_GRAPH = -1
# Copies from pinned memory wait for nothing: one buffer for each step that may be under way, one for the step that was
# waited for, and one to write.
STAGING_BUFFERS = STEPS_AHEAD + 2


@dataclass(slots=True)
class DecodeState:
    """The inputs of a decode step that choosing tokens writes."""

    token_ids: Array  # [B] int64
    positions: Array  # [B] int64
    past_len: Array  # [B] int32
    kv_len: Array  # [all layers' B * Hkv] int32, with what lies between them


class Hidden:
    """What the draft heads of steps of T tokens read and write; None where the graph does not.

    Attributes:
        given: [T, features], beside the tokens of a draft head.
        out: [T, features], for a draft head.
    """

    def __init__(self, manifest: Manifest, tokens: int, device: CudaBuffers) -> None:
        shape = (tokens, manifest.hidden_size)
        self._device = device
        self.out: Array | None = device.empty(shape, manifest.dtype) if manifest.hidden_size else None
        self.given: Array | None = None
        if manifest.drafts:
            self.given = device.empty(shape, manifest.dtype)
            with device.scope():
                self.given.fill(0)

    @property
    def bytes(self) -> int:
        """Device memory of both."""
        return sum(int(array.nbytes) for array in (self.given, self.out) if array is not None)

    def give(self, rows: Sequence[Row]) -> None:
        """Enqueue the copy of what a draft head reads beside the tokens of rows."""
        if self.given is None:
            return
        begin = 0
        with self._device.scope():
            for row in rows:
                end = begin + len(row.tokens)
                self.given[begin:end] = row.hidden
                begin = end

    def hand_on(self, rows: Sequence[Row]) -> None:
        """Hand what a step computed to the readers of its rows."""
        with self._device.scope():
            hand_on_hidden(rows, self.out)

    def bind(self, binding: Any) -> None:
        """Bind what there is."""
        if self.given is not None:
            self._device.bind_input(binding, contract.HIDDEN, self.given)
        if self.out is not None:
            self._device.bind_output(binding, contract.HIDDEN_OUT, self.out)


@dataclass(frozen=True, slots=True)
class _Part:
    """Views of a part of a bucket's inputs; made for each copy, they would take as long as the rest of it."""

    host: npt.NDArray[np.uint8]
    staging: tuple[npt.NDArray[np.uint8], ...]  # pinned, of STAGING_BUFFERS
    device: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """A graph that the first run of its binding captures, and all later ones replay.

    Attributes:
        binding: of ONNX Runtime.
        options: of its runs.
        graph_id: its number; NO_GRAPH: it is not captured, and runs kernel by kernel.
        promises: [1] int32 each, which the binding reads.
        generation: of the caches whose addresses it holds.
        thread: that it belongs to.
    """

    binding: Any
    options: Any
    graph_id: int
    promises: Sequence[npt.NDArray[np.int32]]
    generation: int
    thread: int = field(default_factory=threading.get_ident)

    def is_current(self, generation: int) -> bool:
        """Say whether it can be replayed by this thread, over caches of this generation."""
        return (self.generation, self.thread) == (generation, threading.get_ident())


class Bucket:
    """Steps of one shape.

    Attributes:
        layout: of their inputs.
        inputs: what these are written to first.
        block: the inputs on the device.
        logits: [R, V].
        hidden: what draft heads read and write.
        state: the inputs that choosing tokens writes.
        graphs: by the limit (kv_limits.py) that each was told. All have the same inputs and outputs, and take their
            intermediate results from one arena, so they are kept until caches are replaced: a shorter sequence takes
            that of a lower limit again.
    """

    def __init__(self, manifest: Manifest, shape: StepShape, device: CudaBuffers, logits: Array) -> None:
        self.layout = StepLayout(manifest, shape)
        self._host = np.zeros(self.layout.bytes, np.uint8)
        self.inputs = HostInputs(self.layout, self._host)
        self.block: Array = device.upload(self._host)
        self._device, self._turn = device, 0
        staging = [device.pinned(self._host.shape, np.uint8) for _ in range(STAGING_BUFFERS)]
        self._all, self._tables = (self._part(staging, begin) for begin in (0, self.layout.tables_begin))
        self.logits = logits  # [R, V]
        self.hidden = Hidden(manifest, shape.tokens, device)
        with device.scope():
            self.state = DecodeState(
                token_ids=self.layout.token_ids.view(self.block),
                positions=self.layout.positions.view(self.block),
                past_len=self.layout.past_len.view(self.block),
                kv_len=self.block[self.layout.kv_begin : self.layout.tables_begin].view(np.int32),
            )
        self._sampler = DeviceSampler(device, logits, self.state)
        self.graphs: dict[int, CapturedGraph] = {}

    @property
    def most_tokens(self) -> int:
        """Tokens of a sequence, at most."""
        return self.layout.shape.tokens // self.layout.shape.sequences

    @property
    def bytes(self) -> int:
        """Device memory of the inputs and of choosing tokens; the logits may be shared."""
        return int(self.block.nbytes) + self._sampler.bytes + self.hidden.bytes

    def graph(self, limit: int, generation: int) -> CapturedGraph | None:
        """Return the graph of a limit that can be replayed; None: it is to be captured."""
        graph = self.graphs.get(limit)
        return graph if graph is not None and graph.is_current(generation) else None

    def write(self) -> None:
        """Enqueue the copy of the host's inputs; these may be changed at once."""
        self._write(self._all)

    def write_tables(self) -> None:
        """Enqueue the copy of the host's block tables alone; these may be changed at once."""
        self._write(self._tables)

    def choose(
        self, rows: Sequence[Row], *, goes_on: bool, advance_tokens: int, begin: Any, staging: Any
    ) -> DeviceResult:
        """Enqueue the choice of each logit row's next token; the next step may feed it from where it is.

        Args:
            rows: of the step.
            goes_on: whether the rows before chose by the same rules, each the token that it feeds now.
            advance_tokens: added to the lengths that the next step reads.
            begin: event before the step.
            staging: host memory that the step reads.
        """
        draws = [draw for row in rows for draw in row.draws]
        counts = [row.logprobs for row in rows for _ in row.draws]
        if not goes_on:
            self._sampler.start([*draws, *[None] * (len(self.logits) - len(draws))])
        # Pinned memory is handed out again once a result is dropped: the stream writes there in order.
        produced = self._device.pinned((len(self.logits),), np.int32)
        wanted = [count for count in counts if count is not None]
        words = self._sampler.logprob_results(max(wanted)) if wanted else None
        self._sampler.choose(produced, advance_tokens, words)
        end = self._device.event()
        self._device.record(end)
        return DeviceResult(self._device, Choices(produced, words, counts), (begin, end), self, staging)

    def score(self, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
        """Wait, and return the log-probabilities of one token and of the k best for each of the first logit rows."""
        if not tokens:
            return []  # a kernel of no rows cannot be launched
        targets = self._device.pinned((len(tokens),), np.int32)
        targets[:] = tokens
        words = self._sampler.score(targets, k)
        self._device.synchronize()
        return [each for each in read_logprobs(words, tokens, [k] * len(tokens)) if each is not None]

    def _part(self, staging: Sequence[npt.NDArray[np.uint8]], begin: int) -> _Part:
        """View the inputs from a byte on."""
        with self._device.scope():
            return _Part(self._host[begin:], tuple(buffer[begin:] for buffer in staging), self.block[begin:])

    def _write(self, part: _Part) -> None:
        staging = part.staging[self._turn % STAGING_BUFFERS]
        self._turn += 1
        staging[...] = part.host
        self._device.write(part.device, staging)
