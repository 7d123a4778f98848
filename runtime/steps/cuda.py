"""Runs steps on a CUDA device.

Steps that feed a few tokens of each sequence replay a CUDA graph, captured once per batch size and most tokens of a
sequence; for one token of one sequence also once per limit of its length (kv_limits.py). A step of fewer sequences
takes the next larger graph, whose last sequences then have no tokens. All other steps run kernel by kernel. Tokens are
chosen on the device and stay there, so that the next step is enqueued before the host has seen them. Choosing them
advances the lengths, too: while the same sequences decode, the host writes nothing but new pages. The graph itself
advances nothing, so that the runs which capturing takes leave the caches as one run does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortolan import contract
from ortolan.errors import CapacityError, OrtolanError
from ortolan.runtime.caches.plan import STEPS_AHEAD, CachePlan
from ortolan.runtime.caches.store import CacheStore
from ortolan.runtime.device.buffers import Array
from ortolan.runtime.device.cuda import CudaBuffers
from ortolan.runtime.device.opening import is_out_of_memory
from ortolan.runtime.steps.bucket import NO_GRAPH, Bucket, CapturedGraph, Hidden
from ortolan.runtime.steps.device_result import DeviceResult
from ortolan.runtime.steps.kv_limits import NO_LIMIT, KvLimits
from ortolan.runtime.steps.layout import HostInputs, StepLayout, StepShape
from ortolan.runtime.steps.row import Row
from ortolan.runtime.steps.stepper import Decoder

EMPTY_ENTRY = 0  # of block tables, past the pages in use: never followed, but a page all the same
MOST_STEP_TOKENS = 16  # of each sequence, in a step that is captured


@dataclass(frozen=True, slots=True)
class _Staging:
    """What a step that runs kernel by kernel reads and writes, which must stay as it is until the step is done."""

    host: npt.NDArray[np.uint8]  # pinned, where the step's inputs come from
    hidden: Hidden
    promises: Sequence[npt.NDArray[np.int32]]


class CudaStepper:
    """Feeds tokens to the decoder graph over the caches of a store.

    Graphs belong to the thread that captured them: a stepper that moves to another thread captures anew there.
    """

    depth = STEPS_AHEAD

    def __init__(
        self, decoder: Decoder, store: CacheStore, plan: CachePlan, captures: Mapping[int, Array] | None = None
    ) -> None:
        """Allocate what steps read and write.

        Args:
            decoder: the graph.
            store: caches.
            plan: of them.
            captures: of the only sequence, whose captured steps take queries; rows with others run kernel by kernel.
        """
        assert isinstance(store.buffers, CudaBuffers)
        self._decoder, self._store, self._device = decoder, store, store.buffers
        self._captures: Mapping[int, Array] = captures or {}
        self.captures_graphs = True  # False runs decode steps one kernel at a time
        self._columns = tuple((kind.name, kind.table_pages) for kind in plan.kinds)
        self._sizes, self._limits = batch_sizes(plan.max_sequences), KvLimits(plan)
        self._logits = self._make_logits(self._sizes[-1])
        self._buckets: dict[tuple[int, int], Bucket] = {}
        self._last: tuple[Bucket | None, int] = (None, 0)  # of the step before: its bucket, rows of a decode step
        self._begin = self._device.event()  # of the next step, made while the one before it runs
        self._no_captures: dict[int, Mapping[int, Array]] = {}
        self._eager, self._binding = run_options(NO_GRAPH), decoder.session.io_binding()
        self._generation = -1  # of the caches that `_binding` has

    @property
    def bytes(self) -> int:
        """Device memory of the inputs and outputs of steps, and of choosing tokens."""
        return int(self._logits.nbytes) + sum(bucket.bytes for bucket in self._buckets.values())

    def run(self, rows: Sequence[Row]) -> DeviceResult:
        """Enqueue a step of several sequences."""
        is_eager = not self._can_capture(rows)
        bucket = self._bucket(rows, is_eager=is_eager)
        goes_on = self._goes_on(rows, bucket)
        chosen = None if goes_on else self._pick_chosen(rows)
        self._last = (None, 0)  # until the step is enqueued
        begin = self._begin
        self._device.record(begin)
        try:
            staging = self._run_eagerly(rows, bucket, chosen) if is_eager else None
            if not is_eager:
                self._run_decode(rows, bucket, chosen, goes_on=goes_on)
            hidden = staging.hidden if staging else bucket.hidden
            advance = int(not is_eager and bucket.layout.shape.tokens == bucket.layout.shape.sequences)
            result = bucket.choose(rows, goes_on=goes_on, advance_tokens=advance, begin=begin, staging=staging)
            hidden.hand_on(rows)
            self._begin = self._device.event()
        except Exception:
            self._device.synchronize()  # what was enqueued still reads pinned memory, which others get now
            raise
        self._last = (bucket, len(rows) if advance else 0)
        return result

    def capture(self, row: Row) -> float | None:
        """Capture the graph that a step like this one replays, by a step that `run` repeats."""
        if self.is_ready(row):
            return None
        start = time.perf_counter()
        self._last = (None, 0)
        self._run_decode([row], self._bucket([row]), None, goes_on=False)
        self._device.synchronize()
        return time.perf_counter() - start

    def is_ready(self, row: Row) -> bool:
        """Say whether a step like this one would replay a graph on this thread, or runs kernel by kernel anyway."""
        if not self.captures_graphs or not self._can_capture([row]):
            return True
        bucket = self._bucket([row])
        return bucket.graph(self._limit(row, bucket), self._store.generation) is not None

    def close(self) -> None:
        """Let captured graphs go, and give the memory back."""
        self._device.synchronize()
        for bucket in self._buckets.values():
            self._release(bucket, list(bucket.graphs))
        self._buckets.clear()
        self._no_captures.clear()
        self._last = (None, 0)
        self._binding = self._logits = None
        self._store.clear()
        self._device.trim()

    def _make_logits(self, rows: int) -> Array:
        logits = self._device.allocate((rows, self._decoder.manifest.vocab_size), np.float32)
        self._device.write(logits, np.zeros(logits.shape, np.float32))
        return logits

    def _can_capture(self, rows: Sequence[Row]) -> bool:
        """Say whether a step is one of those that are captured: a few tokens of each, the logits of all wanted."""
        return all(
            len(row.tokens) == len(row.draws) <= MOST_STEP_TOKENS
            and (not row.captures or row.captures is self._captures)
            for row in rows
        )

    def _bucket(self, rows: Sequence[Row], *, is_eager: bool = False) -> Bucket:
        """Return what holds the logits of a step: the smallest batch size for its sequences, or for its logit rows."""
        width = 1 if is_eager else max(len(row.tokens) for row in rows)
        count = len(rows) if width > 1 else sum(len(row.draws) for row in rows)
        size = next((size for size in self._sizes if size >= count), 1 << (count - 1).bit_length())
        if (size, width) not in self._buckets:
            shape = StepShape(tokens=size * width, sequences=size, logit_rows=size * width, columns=self._columns)
            logits = self._make_logits(shape.logit_rows)
            if shape.logit_rows <= self._sizes[-1]:
                with self._device.scope():
                    logits = self._logits[: shape.logit_rows]
            self._buckets[size, width] = Bucket(self._decoder.manifest, shape, self._device, logits)
        return self._buckets[size, width]

    def _limit(self, row: Row, bucket: Bucket) -> int:
        """Return the limit of a captured step, by its first row; none where the graph cannot be told."""
        told = contract.MAX_KV_LEN in self._decoder.inputs
        return self._limits.of_step(row, bucket.layout.shape) if told else NO_LIMIT

    def _goes_on(self, rows: Sequence[Row], bucket: Bucket) -> bool:
        """Say whether the sequences of the decode step before go on, each with the token that it chose there."""
        last, count = self._last
        return last is bucket and count == len(rows) and all(row.source == b for b, row in enumerate(rows))

    def _pick_chosen(self, rows: Sequence[Row]) -> tuple[Array, Array] | None:
        """Copy the choices of the step before that rows feed: their places among the tokens, and their values."""
        last, _ = self._last
        if last is None or all(row.source is None for row in rows):
            return None
        ends = np.cumsum([len(row.tokens) for row in rows])
        pairs = [(end - 1, row.source) for end, row in zip(ends, rows, strict=True) if row.source is not None]
        places, sources = self._device.upload(np.array(pairs, np.int64).T)
        with self._device.scope():
            return places, last.state.token_ids[sources]

    def _put_chosen(self, token_ids: Array, chosen: tuple[Array, Array] | None) -> None:
        if chosen is not None:
            with self._device.scope():
                token_ids[chosen[0]] = chosen[1]

    def _run_eagerly(self, rows: Sequence[Row], bucket: Bucket, chosen: tuple[Array, Array] | None) -> _Staging:
        """Run a step kernel by kernel; its logits are the first rows of the bucket's."""
        shape = StepShape(
            tokens=sum(len(row.tokens) for row in rows),
            sequences=len(rows),
            logit_rows=sum(len(row.draws) for row in rows),
            columns=self._columns,
        )
        layout = StepLayout(self._decoder.manifest, shape)
        host = self._device.pinned((layout.bytes,), np.uint8)
        HostInputs(layout, host).fill(rows, EMPTY_ENTRY)
        block = self._device.upload(host)
        with self._device.scope():
            inputs, logits = layout.named(block), bucket.logits[: shape.logit_rows]
        self._put_chosen(inputs[contract.TOKEN_IDS], chosen)
        if self._generation != self._store.generation:
            self._bind_caches(self._binding)
            self._generation = self._store.generation
        self._bind(self._binding, inputs, rows[0].captures or self._empty_captures(len(rows)), logits)
        hidden = Hidden(self._decoder.manifest, shape.tokens, self._device)
        hidden.give(rows)
        hidden.bind(self._binding)
        promises = self._bind_promises(self._binding, {contract.MAX_QUERY_LEN: max(len(row.tokens) for row in rows)})
        self._run(self._binding, self._eager)
        return _Staging(host, hidden, promises)

    def _run_decode(
        self, rows: Sequence[Row], bucket: Bucket, chosen: tuple[Array, Array] | None, *, goes_on: bool
    ) -> None:
        """Replay the graph of a bucket, or capture it."""
        if not goes_on:
            bucket.inputs.fill(rows, EMPTY_ENTRY)
            bucket.write()
        elif bucket.inputs.extend(rows):
            bucket.write_tables()
        self._put_chosen(bucket.state.token_ids, chosen)
        bucket.hidden.give(rows)
        limit = self._limit(rows[0], bucket)
        graph = bucket.graph(limit, self._store.generation) or self._bind_bucket(bucket, limit)
        self._run(graph.binding, graph.options)

    def _bind_bucket(self, bucket: Bucket, limit: int) -> CapturedGraph:
        """Bind a bucket's inputs for a new capture; where that raises, the next step tries again."""
        generation = self._store.generation
        self._release(bucket, [each for each in bucket.graphs if bucket.graph(each, generation) is None])
        sequences = bucket.layout.shape.sequences
        captures = self._captures if self._captures and sequences == 1 else self._empty_captures(sequences)
        with self._device.scope():
            inputs = bucket.layout.named(bucket.block)
        binding = self._decoder.session.io_binding()
        self._bind_caches(binding)
        self._bind(binding, inputs, captures, bucket.logits)
        bucket.hidden.bind(binding)
        promised = {contract.MAX_KV_LEN: limit, contract.MAX_QUERY_LEN: bucket.most_tokens}
        graph_id = next(self._decoder.graph_ids) if self.captures_graphs else NO_GRAPH
        bucket.graphs[limit] = CapturedGraph(
            binding=binding,
            options=run_options(graph_id),
            graph_id=graph_id,
            promises=self._bind_promises(binding, promised),
            generation=generation,
        )
        return bucket.graphs[limit]

    def _release(self, bucket: Bucket, limits: Iterable[int]) -> None:
        """Let graphs go: the addresses in them are not those of the caches any more, or they are not needed."""
        release = getattr(self._decoder.session, "release_captured_graph", None)
        for graph in [bucket.graphs.pop(limit) for limit in limits]:
            if graph.graph_id != NO_GRAPH and release:
                self._device.synchronize()
                release(graph.graph_id)

    def _empty_captures(self, sequences: int) -> Mapping[int, Array]:
        if sequences not in self._no_captures:
            self._no_captures[sequences] = self._store.make_captures(0, sequences)
        return self._no_captures[sequences]

    def _bind_caches(self, binding: Any) -> None:
        for name, array in self._store.named().items():
            self._device.bind_in_place(binding, name, array)

    def _bind(self, binding: Any, inputs: dict[str, Array], captures: Mapping[int, Array], logits: Array) -> None:
        for name, array in inputs.items():
            if name in self._decoder.inputs:
                self._device.bind_input(binding, name, array)
        for index, array in captures.items():
            self._device.bind_in_place(binding, contract.capture(index), array)
        self._device.bind_output(binding, contract.LOGITS, logits)

    def _bind_promises(self, binding: Any, promised: Mapping[str, int]) -> Sequence[npt.NDArray[np.int32]]:
        """Bind what a step promises, as far as the graph can be told; the arrays must outlive the binding's runs."""
        told = {
            name: np.array([most], np.int32)
            for name, most in promised.items()
            if most != NO_LIMIT and name in self._decoder.inputs
        }
        for name, array in told.items():
            self._device.bind_host_input(binding, name, array)
        return list(told.values())

    def _run(self, binding: Any, options: Any) -> None:
        try:
            self._decoder.session.run_with_iobinding(binding, options)
        except Exception as error:  # the binding raises its own exception types, one per status code
            if is_out_of_memory(error):
                raise CapacityError(
                    f"cuda:{self._device.device_id} has no memory for the decoder's intermediate results: {error}; "
                    "use a smaller chunk_size or chunk_tokens, max_context or max_cache_bytes"
                ) from error
            raise OrtolanError(f"the decoder graph failed: {error}") from error


def batch_sizes(max_sequences: int) -> tuple[int, ...]:
    """Return the batch sizes of decode graphs: powers of two, and the largest that is needed."""
    powers = [1 << n for n in range(max_sequences.bit_length()) if 1 << n < max_sequences]
    return (*powers, max_sequences)


def run_options(graph_id: int) -> Any:
    """Return options of a run that does not wait for the device."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options
