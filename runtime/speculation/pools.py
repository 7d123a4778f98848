"""Holds the caches that drafters work over: of one sequence, or pools of pages that an engine's requests share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ortolan.errors import CapacityError
from ortolan.manifest import Manifest
from ortolan.runtime.caches.pages import PagePool
from ortolan.runtime.caches.plan import CachePlan, plan_caches
from ortolan.runtime.caches.room import PagedRoom
from ortolan.runtime.caches.store import CacheStore, SequenceCaches
from ortolan.runtime.device.buffers import Buffers
from ortolan.runtime.device.cuda import CudaBuffers
from ortolan.runtime.speculation.packed import NoDraftRoomError, Place
from ortolan.runtime.state.sequence import SequenceState
from ortolan.runtime.stats import Stats
from ortolan.runtime.steps.feeder import Feeder, FeederParts
from ortolan.runtime.steps.interrupt import Interrupt
from ortolan.runtime.steps.stepper import Decoder
from ortolan.runtime.steps.together import Packing

FREE_SHARE = 0.5  # of the free device memory, for the caches of one draft model or head


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """What the requests of an engine may take together, of each draft model or head.

    Attributes:
        max_sequences: that draft at once.
        chunk_tokens: most tokens of one step that are known before.
        tokens: whose keys and values there is room for, beside a page of each sequence.
        max_bytes: of all caches; None: what the tokens take.
    """

    max_sequences: int
    chunk_tokens: int
    tokens: int
    max_bytes: int | None = None

    @classmethod
    def of(cls, plan: CachePlan, max_bytes: int | None) -> DraftLimits:
        """Allow as many tokens as the pools of an engine hold."""
        held = [kind.num_pages * kind.page_size for kind in plan.kinds if kind.grows]
        return cls(
            max_sequences=plan.max_sequences,
            chunk_tokens=plan.chunk_size,
            tokens=min(held, default=plan.max_sequences * plan.max_context),
            max_bytes=max_bytes,
        )


class DraftPools:
    """The caches of drafts, by the graph that they belong to; made as they are needed, by one thread.

    Attributes:
        max_context: the longest sequence that is drafted for.
    """

    def __init__(self, max_context: int, limits: DraftLimits | None = None) -> None:
        """Allow sequences within the limits; None: one, which has what it needs."""
        self.max_context, self._limits = max_context, limits
        self._shared: dict[int, _SharedPool] = {}  # by the decoder's identity
        self._alone: dict[int, tuple[Decoder, list[Feeder]]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of all caches, and of the inputs and outputs of steps."""
        alone = [each for _, feeders in self._alone.values() for each in feeders]
        return sum(pool.bytes for pool in self._shared.values()) + sum(map(_bytes_of, alone))

    def open(self, decoder: Decoder, buffers: Buffers) -> Place:
        """Make room for one more sequence of a graph.

        Raises:
            NoDraftRoomError: there are as many as may be.
            CapacityError: there is no memory.
        """
        if self._limits is None or not decoder.manifest.paged:
            return self._open_alone(decoder, buffers)
        key = id(decoder)
        if key not in self._shared:
            self._shared[key] = _SharedPool(decoder, buffers, self._plan(decoder.manifest, buffers, self._limits))
        return self._shared[key].open()

    def close(self) -> None:
        """Let everything go; no step follows."""
        for pool in self._shared.values():
            pool.packing.stepper.close()
        for _, feeders in self._alone.values():
            for feeder in feeders:
                feeder.stepper.close()
        self._shared.clear()
        self._alone.clear()

    def _plan(self, manifest: Manifest, buffers: Buffers, limits: DraftLimits) -> CachePlan:
        context = min(self.max_context, manifest.max_context)
        cuda = buffers if isinstance(buffers, CudaBuffers) else None
        plan = plan_caches(manifest, context, limits.chunk_tokens, cuda=cuda is not None)
        if cuda is not None:
            free = int(cuda.memory()[0] * FREE_SHARE)
            limits = replace(limits, max_bytes=min(free, limits.max_bytes or free))
        return plan_draft_pools(plan, limits)

    def _open_alone(self, decoder: Decoder, buffers: Buffers) -> Place:
        """Make caches for one sequence alone, whose steps nobody shares."""
        from ortolan.runtime.assembly import make_feeder_parts  # which makes sessions, and these have drafters

        manifest = decoder.manifest
        _, opened = self._alone.setdefault(id(decoder), (decoder, []))
        context = min(self.max_context, manifest.max_context)
        is_cuda = isinstance(buffers, CudaBuffers)
        plan = plan_caches(manifest, context, manifest.chunk_size, cuda=is_cuda)
        self._check_alone(plan, len(opened))
        small = [
            plan.grown_capacity(index, 1) if layer.kind == "full" else layer.capacity
            for index, layer in enumerate(plan.layers)
        ]
        feeder = Feeder(make_feeder_parts(decoder, plan, buffers, None, small), Stats())
        opened.append(feeder)

        def give_back() -> None:
            if feeder in opened:
                opened.remove(feeder)
                feeder.stepper.close()

        return Place(feeder, Packing(feeder.stepper), give_back)

    def _check_alone(self, plan: CachePlan, opened: int) -> None:
        limits = self._limits
        if limits is None:
            return
        most = limits.max_sequences
        if limits.max_bytes is not None:
            most = min(most, limits.max_bytes // max(1, plan.bytes))
        if opened >= most:
            raise NoDraftRoomError(f"{opened} sequences draft, and there are caches of {plan.bytes} bytes for {most}")


class _SharedPool:
    """The pools of one graph, whose sequences are fed in common steps."""

    def __init__(self, decoder: Decoder, buffers: Buffers, plan: CachePlan) -> None:
        from ortolan.runtime.assembly import make_stepper

        self._decoder, self._plan = decoder, plan
        self._store = CacheStore(decoder.manifest, plan, buffers)
        self._pages = {kind.name: PagePool(kind.name, kind.num_pages) for kind in plan.kinds}
        self.packing = Packing(make_stepper(decoder, self._store, plan))

    @property
    def bytes(self) -> int:
        """Bytes of all pages, held or not, and of the inputs and outputs of steps."""
        return self._store.bytes + self.packing.stepper.bytes

    def open(self) -> Place:
        """Take the pages that a sequence has from its beginning. Raises NoDraftRoomError."""
        state = SequenceState()
        caches = SequenceCaches(self._store, state.pages)
        try:
            room = PagedRoom(self._store, self._plan, caches, state.pages, self._pages)
        except CapacityError as error:
            raise NoDraftRoomError(str(error)) from error
        parts = FeederParts(
            manifest=self._decoder.manifest,
            plan=self._plan,
            state=state,
            caches=caches,
            room=room,
            stepper=self.packing.stepper,
            interrupt=Interrupt(),
        )
        return Place(Feeder(parts, Stats()), self.packing, room.close)


def plan_draft_pools(plan: CachePlan, limits: DraftLimits) -> CachePlan:
    """Return the plan of one drafted sequence with pools for several.

    Args:
        plan: of one sequence of a paged graph.
        limits: of all.

    Raises:
        CapacityError: the bytes hold less than a page of each kind, beside what each sequence has at once.
    """
    count = limits.max_sequences
    fixed = count * sum(kind.table_pages * kind.page_bytes for kind in plan.kinds if not kind.grows)
    grown = sum(kind.page_bytes for kind in plan.kinds if kind.grows)
    pages = -(-limits.tokens // plan.page_size) + count
    if limits.max_bytes is not None:
        pages = min(pages, (limits.max_bytes - fixed) // grown if grown else int(fixed <= limits.max_bytes))
    if pages < 1:
        raise CapacityError(
            f"max_draft_bytes is {limits.max_bytes}; drafts for {count} sequences need at least {fixed + grown}"
        )
    kinds = tuple(
        replace(kind, num_pages=min(pages, count * kind.table_pages) if kind.grows else count * kind.table_pages)
        for kind in plan.kinds
    )
    return replace(plan, max_sequences=count, kinds=kinds)


def _bytes_of(feeder: Feeder) -> int:
    return feeder.room.bytes + feeder.stepper.bytes
