"""Runs steps on the CPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortolan import contract
from ortolan.errors import OrtolanError
from ortolan.runtime.caches.plan import CachePlan
from ortolan.runtime.caches.store import CacheStore
from ortolan.runtime.device.buffers import Array, wrap
from ortolan.runtime.generate.logprobs import TokenLogprobs, top_logprobs
from ortolan.runtime.generate.sampler import choose
from ortolan.runtime.steps.interrupt import Interrupt
from ortolan.runtime.steps.kept_result import KeptResult
from ortolan.runtime.steps.layout import HostInputs, StepLayout, StepShape
from ortolan.runtime.steps.row import Row
from ortolan.runtime.steps.stepper import BAD, Decoder, Logits
from ortolan.runtime.steps.together import hand_on_hidden

NO_PAGE = -1  # in a table's entries past the pages in use, which are never followed
SHAPES_KEPT = 8  # bindings of the latest shapes of steps


def host_result(rows: Sequence[Row], logits: Logits) -> KeptResult:
    """Choose tokens on the host, from logits [R, V]."""
    tokens = choose(logits, [draw for row in rows for draw in row.draws])
    return KeptResult(tokens, logits, _top_logprobs(rows, logits, tokens))


def _top_logprobs(rows: Sequence[Row], logits: Logits, tokens: list[int]) -> list[TokenLogprobs | None]:
    """Return log-probabilities for each logit row; None where a row of the step wants none, or has no numbers."""
    result: list[TokenLogprobs | None] = [None] * len(tokens)
    begin = 0
    for row in rows:
        end = begin + len(row.draws)
        if row.logprobs is not None and BAD not in tokens[begin:end]:
            result[begin:end] = top_logprobs(logits[begin:end], tokens[begin:end], row.logprobs)
        begin = end
    return result


@dataclass(slots=True)
class _Bound:
    """A binding for steps of one shape, with the memory that it reads and writes."""

    layout: StepLayout
    block: npt.NDArray[np.uint8]
    inputs: HostInputs
    logits: Logits
    binding: Any
    hidden: Array | None = None  # what a draft head reads
    hidden_out: Array | None = None  # what one will read
    generation: int = -1
    captures: Mapping[int, Array] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of the memory."""
        arrays = (self.block, self.logits, self.hidden, self.hidden_out)
        return sum(array.nbytes for array in arrays if array is not None)


class HostStepper:
    """Feeds tokens to the decoder graph over the caches of a store; every step is done when `run` returns."""

    depth = 0

    def __init__(
        self, decoder: Decoder, store: CacheStore, plan: CachePlan, interrupt: Interrupt | None = None
    ) -> None:
        """Bind nothing yet; `interrupt` ends a run that is under way."""
        self._decoder, self._store, self._plan = decoder, store, plan
        self._interrupt, self._options = interrupt or Interrupt(), onnxruntime.RunOptions()
        self._bound: OrderedDict[StepShape, _Bound] = OrderedDict()
        self._no_captures: dict[int, Mapping[int, Array]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the inputs and outputs of steps."""
        return sum(bound.bytes for bound in self._bound.values())

    def run(self, rows: Sequence[Row]) -> KeptResult:
        """Feed tokens of several sequences."""
        bound = self._binding(rows)
        bound.inputs.fill(rows, NO_PAGE)
        if bound.hidden is not None:
            bound.hidden[:] = np.concatenate([row.hidden for row in rows])
        self._bind_caches(bound, rows)
        try:
            with self._interrupt.running(self._options):
                self._decoder.session.run_with_iobinding(bound.binding, self._options)
        except Exception as error:  # the binding raises its own exception types, one per status code
            self._interrupt.check()
            raise OrtolanError(f"the decoder graph failed: {error}") from error
        hand_on_hidden(rows, bound.hidden_out)
        return host_result(rows, bound.logits)

    def capture(self, row: Row) -> None:
        """Return None: there is nothing to make ready."""

    def is_ready(self, row: Row) -> bool:
        """Say yes."""
        return True

    def close(self) -> None:
        """Do nothing: the arrays go with the last reference."""

    def _binding(self, rows: Sequence[Row]) -> _Bound:
        """Return the binding for the shape of a step."""
        shape = StepShape(
            tokens=sum(len(row.tokens) for row in rows),
            sequences=len(rows),
            logit_rows=sum(len(row.draws) for row in rows),
            columns=tuple((kind.name, self._columns(kind.name, kind.table_pages, rows)) for kind in self._plan.kinds),
        )
        if shape not in self._bound:
            while len(self._bound) >= SHAPES_KEPT:
                self._bound.popitem(last=False)
            self._bound[shape] = self._bind(shape)
        self._bound.move_to_end(shape)
        return self._bound[shape]

    def _columns(self, kind: str, most: int, rows: Sequence[Row]) -> int:
        """Return the columns of a block table: a power of two, so that few shapes occur, or all of a ring's."""
        used = max(len(row.pages[kind]) for row in rows)
        grows = next(pool.grows for pool in self._plan.kinds if pool.name == kind)
        return min(1 << (used - 1).bit_length(), most) if grows else most

    def _bind(self, shape: StepShape) -> _Bound:
        layout, binding = StepLayout(self._decoder.manifest, shape), self._decoder.session.io_binding()
        block = np.zeros(layout.bytes, np.uint8)
        logits = np.empty((shape.logit_rows, self._decoder.manifest.vocab_size), np.float32)
        for name, array in layout.named(block).items():
            if name in self._decoder.inputs:
                binding.bind_ortvalue_input(name, wrap(array))
        binding.bind_ortvalue_output(contract.LOGITS, wrap(logits))
        bound = _Bound(layout, block, HostInputs(layout, block), logits, binding)
        manifest, buffers = self._decoder.manifest, self._store.buffers
        if manifest.hidden_size:
            bound.hidden_out = buffers.empty((shape.tokens, manifest.hidden_size), manifest.dtype)
            buffers.bind_output(binding, contract.HIDDEN_OUT, bound.hidden_out)
        if manifest.drafts:
            bound.hidden = buffers.empty((shape.tokens, manifest.hidden_size), manifest.dtype)
            buffers.bind_input(binding, contract.HIDDEN, bound.hidden)
        return bound

    def _bind_caches(self, bound: _Bound, rows: Sequence[Row]) -> None:
        """Bind caches and captured queries, where others were bound before."""
        buffers = self._store.buffers
        if bound.generation != self._store.generation:
            for name, array in self._store.named().items():
                buffers.bind_in_place(bound.binding, name, array)
            bound.generation = self._store.generation
        captures = rows[0].captures or self._empty_captures(len(rows))
        if bound.captures is not captures:
            for index, array in captures.items():
                buffers.bind_in_place(bound.binding, contract.capture(index), array)
            bound.captures = captures

    def _empty_captures(self, sequences: int) -> Mapping[int, Array]:
        if sequences not in self._no_captures:
            self._no_captures[sequences] = self._store.make_captures(0, sequences)
        return self._no_captures[sequences]
