"""Runs steps of many sequences on a paged model's page pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ortolan import contract
from ortolan.errors import OrtolanError
from ortolan.manifest import Manifest
from ortolan.policies import Eviction
from ortolan.runtime.batch_inputs import BatchLayout, Row
from ortolan.runtime.buffers import Array, HostBuffers, wrap
from ortolan.runtime.engine_plan import EnginePlan
from ortolan.runtime.evictor import evict
from ortolan.runtime.paged_caches import NO_PAGE
from ortolan.runtime.pools import Pools, SequenceCaches
from ortolan.runtime.stepper import Logits

BAD = -1  # in place of a token: the logits are no numbers


class StepResult(Protocol):
    """What a step chose."""

    def tokens(self) -> list[int]:
        """Wait, and return the token after each row; `BAD` where a logit is NaN or infinite, any without a choice."""


class BatchStepper(Protocol):
    """What an engine runs its steps with; used by one thread."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of all page pools."""

    @property
    def runs_ahead(self) -> bool:
        """Whether `run` returns before the step is done, and rows may have a source."""

    def run(self, rows: Sequence[Row]) -> StepResult:
        """Feed tokens of several sequences, at least one; one sequence's failure may be that of all.

        At most one step may be under way that was not waited for.

        Raises:
            OrtolanError: the step failed; to feed its tokens again is safe.
        """

    def make_captures(self, rows: int) -> Mapping[int, Array]:
        """Allocate what takes a sequence's last `rows` queries. Raises CapacityError."""

    def evict(self, row: Row, options: Eviction) -> dict[int, npt.NDArray[np.int32]]:
        """Evict one sequence, described as if to feed nothing; returns the tokens that each kv head keeps, [Hkv].

        Raises:
            OrtolanError: the eviction failed, and the sequence's caches are lost.
        """

    def close(self) -> None:
        """Give back what others could use; no step follows."""


class HostResult:
    """Tokens chosen on the host, from logits [B, V]."""

    def __init__(self, rows: Sequence[Row], logits: Logits) -> None:
        finite = np.isfinite(logits.sum(axis=1, dtype=np.float64))
        self._tokens = [_choose(row, logits[b]) if finite[b] else BAD for b, row in enumerate(rows)]

    def tokens(self) -> list[int]:
        """Return the token after each row."""
        return self._tokens


def _choose(row: Row, logits: Logits) -> int:
    return row.choice.sampler.choose(logits, row.choice.tokens) if row.choice else 0


class HostBatchStepper:
    """Runs steps on the CPU."""

    runs_ahead = False

    def __init__(self, ort_session: Any, evict_sessions: EvictSessions, manifest: Manifest, plan: EnginePlan) -> None:
        self._session, self._evict_sessions, self._manifest = ort_session, evict_sessions, manifest
        self._buffers = HostBuffers()
        self._pools = Pools(manifest, plan, self._buffers)
        self._rings = {kind.name: kind.table_pages for kind in plan.kinds if kind.is_ring}
        self._inputs = {i.name for i in ort_session.get_inputs()}
        self._binding = ort_session.io_binding()
        for name, array in self._pools.named().items():
            self._buffers.bind_in_place(self._binding, name, array)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all page pools."""
        return self._pools.bytes

    def run(self, rows: Sequence[Row]) -> HostResult:
        """Feed tokens of several sequences."""
        columns = {
            kind.name: self._rings.get(kind.name) or max(len(row.pages[kind.name]) for row in rows)
            for kind in self._manifest.cache_kinds
        }
        layout = BatchLayout(self._manifest, sum(len(row.tokens) for row in rows), len(rows), columns)
        block = np.zeros(layout.bytes, np.uint8)
        layout.fill(block, rows, NO_PAGE)
        for name, array in layout.named(block).items():
            if name in self._inputs:
                self._binding.bind_ortvalue_input(name, wrap(array))
        captures = rows[0].captures or self._pools.make_captures(0, len(rows))
        for index, array in captures.items():
            self._buffers.bind_in_place(self._binding, contract.capture(index), array)
        logits = np.empty((len(rows), self._manifest.vocab_size), np.float32)
        self._binding.bind_ortvalue_output(contract.LOGITS, wrap(logits))
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # the binding raises its own exception types, one per status code
            raise OrtolanError(f"the decoder graph failed: {error}") from error
        return HostResult(rows, logits)

    def make_captures(self, rows: int) -> dict[int, Array]:
        """Allocate what takes a sequence's last `rows` queries."""
        return self._pools.make_captures(rows)

    def evict(self, row: Row, options: Eviction) -> dict[int, npt.NDArray[np.int32]]:
        """Evict one sequence; returns the tokens that each kv head keeps, [Hkv]."""
        return evict_sequence(self._evict_sessions(options), self._pools, row, options)

    def close(self) -> None:
        """Do nothing: the arrays go with the last reference."""


class EvictSessions(Protocol):
    """Opens eviction graphs."""

    def __call__(self, options: Eviction) -> Any:
        """Return the session of the eviction graph for these options. Raises ConfigError."""


def evict_sequence(ort_session: Any, pools: Pools, row: Row, options: Eviction) -> dict[int, npt.NDArray[np.int32]]:
    """Compact one sequence's pages; returns the tokens that each kv head of each evictable layer keeps, [Hkv]."""
    caches = SequenceCaches(pools, row.captures, row.pages)
    heads = {i: pools.manifest.layers[i].num_kv_heads for i in row.captures}
    physical = {i: row.physical.get(i, np.full(count, row.logical, np.int32)) for i, count in heads.items()}
    keep = evict(ort_session, caches, options, physical, row.logical, row.variant)
    return {
        i: np.broadcast_to((positions >= 0).sum(axis=1, dtype=np.int32), (heads[i],)).copy()
        for i, positions in keep.items()
    }
