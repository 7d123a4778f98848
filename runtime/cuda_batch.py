"""Runs steps of many sequences on a CUDA device.

Steps that feed one token of each sequence replay a CUDA graph, captured once per batch size; a step of fewer sequences
takes the next larger one, whose last sequences then have no tokens. All other steps run kernel by kernel. Tokens are
chosen on the device and stay there, so that the next step is enqueued before the host has seen them. Choosing them
advances the lengths, too: while the same sequences decode, the host writes nothing but new pages.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan import contract
from ortolan.errors import CapacityError, OrtolanError
from ortolan.manifest import Manifest
from ortolan.policies import Eviction
from ortolan.runtime.batch_inputs import BatchLayout, Choice, Row
from ortolan.runtime.batch_stepper import EvictSessions, evict_sequence
from ortolan.runtime.buffers import Array
from ortolan.runtime.cuda import CudaBuffers
from ortolan.runtime.cuda_stepper import NO_GRAPH, is_out_of_memory, run_options
from ortolan.runtime.device_loop import TokenChooser, pack_rules
from ortolan.runtime.engine_plan import EnginePlan
from ortolan.runtime.options import Sampling
from ortolan.runtime.pools import Pools

EMPTY_ENTRY = 0  # of block tables, past the pages in use: never followed, but a page all the same
STAGING_BUFFERS = 3  # copies from pinned memory wait for nothing; a step is over before the second after it is written
GREEDY = Sampling()


@dataclass(slots=True)
class ChainState:
    """The inputs of a decode step that choosing tokens writes."""

    token_ids: Array  # [B] int64
    positions: Array  # [B] int64
    past_len: Array  # [B] int32
    kv_len: Array  # [all layers' B * Hkv] int32, with what lies between them


class Bucket:
    """Decode steps of one batch size: their inputs at fixed addresses, and what chooses their tokens."""

    def __init__(self, manifest: Manifest, size: int, columns: dict[str, int], device: CudaBuffers, logits: Array):
        self.layout = BatchLayout(manifest, size, size, columns)
        self.host = np.zeros(self.layout.bytes, np.uint8)
        self.block: Array = device.upload(self.host)
        self._device, self._turn = device, 0
        self._staging = [device.pinned(self.host.shape, np.uint8) for _ in range(STAGING_BUFFERS)]
        self.logits = logits  # [B, V]
        with device.scope():
            self.state = ChainState(
                token_ids=self.layout.token_ids.view(self.block),
                positions=self.layout.positions.view(self.block),
                past_len=self.layout.past_len.view(self.block),
                kv_len=self.block[self.layout.kv_begin : self.layout.tables_begin].view(np.int32),
            )
        self.chooser = TokenChooser(device, logits, self.state)
        self.captures: dict[int, Array] = {}  # of no rows
        self.binding: Any = None
        self.options: Any = None  # of runs that replay the graph
        self.graph_id = NO_GRAPH

    def write(self, begin: int, end: int) -> None:
        """Enqueue the copy of a range of the host's inputs; these may be changed at once."""
        staging = self._staging[self._turn % STAGING_BUFFERS]
        self._turn += 1
        staging[begin:end] = self.host[begin:end]
        with self._device.scope():
            target = self.block[begin:end]
        self._device.write(target, staging[begin:end])


class DeviceResult:
    """Tokens on their way from the device."""

    def __init__(
        self, device: CudaBuffers, produced: npt.NDArray[np.int32], count: int, event: Any, staging: Any
    ) -> None:
        self._device, self._produced, self._count, self._event = device, produced, count, event
        self._staging = staging  # memory that the step reads
        self._tokens: list[int] | None = None

    def tokens(self) -> list[int]:
        """Wait, and return the token after each row; `BAD` where a logit is NaN or infinite."""
        if self._tokens is None:
            self._device.wait(self._event)
            self._tokens = self._produced[: self._count].tolist()
            self._staging = None
        return self._tokens


class CudaBatchStepper:
    """Runs steps on a CUDA device, always from the same thread: graphs belong to the one that captured them."""

    runs_ahead = True

    def __init__(
        self,
        ort_session: Any,
        evict_sessions: EvictSessions,
        manifest: Manifest,
        plan: EnginePlan,
        device: CudaBuffers,
        graph_ids: Iterator[int],
    ) -> None:
        self._session, self._evict_sessions, self._manifest = ort_session, evict_sessions, manifest
        self._device, self._graph_ids = device, graph_ids
        self.captures_graphs = True  # False runs decode steps one kernel at a time
        self._pools = Pools(manifest, plan, device)
        self._columns = {kind.name: kind.table_pages for kind in plan.kinds}
        self._inputs = {i.name for i in ort_session.get_inputs()}
        self._sizes = batch_sizes(plan.max_sequences)
        self._logits: Array = device.allocate((self._sizes[-1], manifest.vocab_size), np.float32)
        device.write(self._logits, np.zeros(self._logits.shape, np.float32))
        self._buckets: dict[int, Bucket] = {}
        self._last: tuple[Bucket | None, int] = (None, 0)  # of the step before: its batch size, rows of a decode step
        self._eager, self._binding = run_options(NO_GRAPH), ort_session.io_binding()
        self._bind_pools(self._binding)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all page pools."""
        return self._pools.bytes

    def run(self, rows: Sequence[Row]) -> DeviceResult:
        """Enqueue a step of several sequences.

        Raises:
            CapacityError: there is no device memory for intermediate results.
            OrtolanError: ONNX Runtime or a kernel failed.
        """
        bucket = self._bucket(len(rows))
        goes_on = self._goes_on(rows, bucket)
        chosen = None if goes_on else self._pick_chosen(rows)
        self._last = (None, 0)  # until the step is enqueued
        eager = any(len(row.tokens) != 1 or row.captures for row in rows)
        try:
            staging = self._run_eagerly(rows, bucket, chosen) if eager else None
            if not eager:
                self._run_decode(rows, bucket, chosen, goes_on=goes_on)
            result = self._choose(rows, bucket, staging, goes_on=goes_on, advance_tokens=0 if eager else 1)
        except Exception:
            self._device.synchronize()  # what was enqueued still reads pinned memory, which others get now
            raise
        self._last = (bucket, 0 if eager else len(rows))
        return result

    def make_captures(self, rows: int) -> dict[int, Array]:
        """Allocate what takes a sequence's last `rows` queries. Raises CapacityError."""
        return self._pools.make_captures(rows)

    def evict(self, row: Row, options: Eviction) -> dict[int, npt.NDArray[np.int32]]:
        """Evict one sequence; returns the tokens that each kv head keeps, [Hkv]."""
        return evict_sequence(self._evict_sessions(options), self._pools, row, options)

    def close(self) -> None:
        """Let captured graphs go, and give the memory back."""
        self._device.synchronize()
        release = getattr(self._session, "release_captured_graph", None)
        for bucket in self._buckets.values():
            if release and bucket.graph_id != NO_GRAPH:
                release(bucket.graph_id)
        self._buckets.clear()
        self._last = (None, 0)
        self._binding = self._logits = None
        self._pools.layers.clear()
        self._device.trim()

    def _bucket(self, count: int) -> Bucket:
        """Return the smallest batch size that holds `count` sequences."""
        size = next(size for size in self._sizes if size >= count)
        if size not in self._buckets:
            with self._device.scope():
                logits = self._logits[:size]
            self._buckets[size] = Bucket(self._manifest, size, self._columns, self._device, logits)
        return self._buckets[size]

    def _goes_on(self, rows: Sequence[Row], bucket: Bucket) -> bool:
        """Say whether the sequences of the decode step before go on, each with the token that it chose there."""
        last, count = self._last
        return last is bucket and count == len(rows) and all(row.source == b for b, row in enumerate(rows))

    def _pick_chosen(self, rows: Sequence[Row]) -> tuple[Array, Array] | None:
        """Copy the choices of the step before that rows feed: their places among the tokens, and their values."""
        last, _ = self._last
        ends = np.cumsum([len(row.tokens) for row in rows])
        pairs = [(end - 1, row.source) for end, row in zip(ends, rows, strict=True) if row.source is not None]
        if last is None or not pairs:
            return None
        places, sources = self._device.upload(np.array(pairs, np.int64).T)
        with self._device.scope():
            return places, last.state.token_ids[sources]

    def _put_chosen(self, token_ids: Array, chosen: tuple[Array, Array] | None) -> None:
        if chosen is not None:
            with self._device.scope():
                token_ids[chosen[0]] = chosen[1]

    def _run_eagerly(self, rows: Sequence[Row], bucket: Bucket, chosen: tuple[Array, Array] | None) -> Any:
        """Run a step kernel by kernel; its logits are the first rows of the batch size's.

        Returns the host memory that the step's inputs come from, which must stay as it is until the step is done.
        """
        layout = BatchLayout(self._manifest, sum(len(row.tokens) for row in rows), len(rows), self._columns)
        host = self._device.pinned((layout.bytes,), np.uint8)
        layout.fill(host, rows, EMPTY_ENTRY)
        block = self._device.upload(host)
        with self._device.scope():
            inputs, logits = layout.named(block), bucket.logits[: len(rows)]
        self._put_chosen(inputs[contract.TOKEN_IDS], chosen)
        captures = rows[0].captures or self._pools.make_captures(0, len(rows))
        self._bind(self._binding, inputs, captures, logits)
        self._run(self._binding, self._eager)
        return host

    def _run_decode(
        self, rows: Sequence[Row], bucket: Bucket, chosen: tuple[Array, Array] | None, *, goes_on: bool
    ) -> None:
        """Replay the graph of a batch size, or capture it."""
        layout = bucket.layout
        if not goes_on:
            layout.fill(bucket.host, rows, EMPTY_ENTRY)
            bucket.write(0, layout.bytes)
        elif layout.extend(bucket.host, rows):
            bucket.write(layout.tables_begin, layout.bytes)
        self._put_chosen(bucket.state.token_ids, chosen)
        if bucket.binding is None:
            self._bind_bucket(bucket)
        self._run(bucket.binding, bucket.options)

    def _bind_bucket(self, bucket: Bucket) -> None:
        """Bind a batch size's inputs once and for all; where that raises, the next step tries again."""
        captures = self._pools.make_captures(0, bucket.layout.sequences)
        with self._device.scope():
            inputs = bucket.layout.named(bucket.block)
        binding = self._session.io_binding()
        self._bind_pools(binding)
        self._bind(binding, inputs, captures, bucket.logits)
        bucket.graph_id = next(self._graph_ids) if self.captures_graphs else NO_GRAPH
        bucket.options = run_options(bucket.graph_id)
        bucket.captures, bucket.binding = captures, binding

    def _choose(
        self, rows: Sequence[Row], bucket: Bucket, staging: Any, *, goes_on: bool, advance_tokens: int
    ) -> DeviceResult:
        """Enqueue the choice of each row's next token; the next step may feed it from where it is on the device."""
        choices = [row.choice for row in rows] + [None] * (bucket.layout.sequences - len(rows))
        if not goes_on:
            sampling = [choice.sampling if choice else GREEDY for choice in choices]
            penalized = any(options.repetition_penalty != 1.0 for options in sampling)
            histories = [choice.tokens if choice and penalized else () for choice in choices]
            bucket.chooser.start(sampling, histories)
        if any(choice and choice.sampling.temperature > 0 for choice in choices):
            bucket.chooser.reseed(draw_rules(choices))
        # Pinned memory is handed out again once a result is dropped: the stream writes there in order.
        produced, event = self._device.pinned((len(choices),), np.int32), self._device.event()
        bucket.chooser.choose(produced, draw=0, advance_tokens=advance_tokens)
        self._device.record(event)
        return DeviceResult(self._device, produced, len(rows), event, staging)

    def _bind_pools(self, binding: Any) -> None:
        for name, array in self._pools.named().items():
            self._device.bind_in_place(binding, name, array)

    def _bind(self, binding: Any, inputs: dict[str, Array], captures: Any, logits: Array) -> None:
        for name, array in inputs.items():
            if name in self._inputs:
                self._device.bind_input(binding, name, array)
        for index, array in captures.items():
            self._device.bind_in_place(binding, contract.capture(index), array)
        self._device.bind_output(binding, contract.LOGITS, logits)

    def _run(self, binding: Any, options: Any) -> None:
        try:
            self._session.run_with_iobinding(binding, options)
        except Exception as error:  # the binding raises its own exception types, one per status code
            if is_out_of_memory(error):
                raise CapacityError(
                    f"cuda:{self._device.device_id} has no memory for the decoder's intermediate results: {error}; "
                    "make the engine with fewer max_cache_bytes or chunk_tokens"
                ) from error
            raise OrtolanError(f"the decoder graph failed: {error}") from error


def batch_sizes(max_sequences: int) -> tuple[int, ...]:
    """Return the batch sizes of decode graphs: powers of two, and the largest that is needed."""
    powers = [1 << n for n in range(max_sequences.bit_length()) if 1 << n < max_sequences]
    return (*powers, max_sequences)


def draw_rules(choices: Sequence[Choice | None]) -> npt.NDArray[Any]:
    """Lay out the rules of one draw each, [B]; it depends on a sequence's seed and length alone."""
    rules = pack_rules([choice.sampling if choice else GREEDY for choice in choices])
    for rule, choice in zip(rules, choices, strict=True):
        if choice:
            seed = struct.pack("<QQ", choice.seed % 2**64, len(choice.tokens))
            rule["seed"] = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little")
    return rules
