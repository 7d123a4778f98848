"""Puts sessions and the stores of engines together from their parts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ortolan.policies import Eviction
from ortolan.runtime.caches.plan import CachePlan
from ortolan.runtime.caches.room import ContiguousRoom, PagedRoom, Room
from ortolan.runtime.caches.store import CacheStore, SequenceCaches
from ortolan.runtime.device.buffers import Buffers
from ortolan.runtime.device.cuda import CudaBuffers
from ortolan.runtime.session import Session
from ortolan.runtime.session_parts import SessionParts
from ortolan.runtime.state.sequence import SequenceState
from ortolan.runtime.steps.cuda import CudaStepper
from ortolan.runtime.steps.feeder import FeederParts
from ortolan.runtime.steps.host import HostStepper
from ortolan.runtime.steps.interrupt import Interrupt
from ortolan.runtime.steps.stepper import Decoder, Stepper

if TYPE_CHECKING:
    from ortolan.runtime.model import Model

_log = logging.getLogger(__name__)


def make_session(
    model: Model, plan: CachePlan, eviction: Eviction | None, capacities: list[int] | None = None
) -> Session:
    """Make an empty session; `capacities` are the slots of each layer, where they are not the plan's.

    Raises:
        CapacityError: there is no memory.
    """
    evict_session = None if eviction is None else model.evictions.open(eviction)
    score_session = None if eviction is None else model.evictions.open_score(eviction)
    model.memory.check_room(plan if capacities is None else plan.with_capacities(capacities), eviction)
    feeder = make_feeder_parts(model.decoder, plan, model.device.buffers, eviction, capacities)
    _log.info(
        "made a session of max_context %d and chunk_size %d: %d bytes of caches, %s",
        plan.max_context,
        plan.chunk_size,
        feeder.room.bytes,
        eviction or "no eviction",
    )
    return Session(
        SessionParts(
            feeder=feeder,
            eviction=eviction,
            evict_session=evict_session,
            score_session=score_session,
            identify=lambda: model.fingerprint,
            tokenizer=lambda: model.tokenizer,
            detokenize=model.detokenize,
            open_drafter=lambda speculation: speculation.open(model, plan.max_context),
            report=model.memory.report,
            make_another=lambda slots: make_session(model, plan, eviction, slots),
        )
    )


def make_feeder_parts(
    decoder: Decoder,
    plan: CachePlan,
    buffers: Buffers,
    eviction: Eviction | None,
    capacities: list[int] | None,
) -> FeederParts:
    """Allocate one sequence's caches, and what feeds them. Raises CapacityError."""
    manifest = decoder.manifest
    rows = min(eviction.captured_queries, plan.max_context) if eviction else 0
    store = CacheStore(manifest, plan, buffers, None if manifest.paged else capacities)
    state = SequenceState()
    caches = SequenceCaches(store, state.pages, store.make_captures(rows))
    state.captures = caches.captures
    room: Room = ContiguousRoom(store)
    if manifest.paged:
        room = PagedRoom(store, plan, caches, state.pages)
        if capacities:
            growing = [i for kind in manifest.cache_kinds for i in kind.layers if plan.layers[i].kind == "full"]
            room.fit({i: capacities[i] for i in growing}, dict.fromkeys(growing, 0))
    interrupt = Interrupt()
    return FeederParts(
        manifest=manifest,
        plan=plan,
        state=state,
        caches=caches,
        room=room,
        stepper=make_stepper(decoder, store, plan, state, interrupt),
        interrupt=interrupt,
        capture_rows=rows,
    )


def make_stepper(
    decoder: Decoder,
    store: CacheStore,
    plan: CachePlan,
    state: SequenceState | None = None,
    interrupt: Interrupt | None = None,
) -> Stepper:
    """Make what runs steps over a store, on the device where it lies.

    Args:
        decoder: the graph.
        store: caches.
        plan: of them.
        state: of the store's only sequence, if it has one.
        interrupt: ends a step on the host; on a device, steps are short, and nothing ends them.
    """
    if isinstance(store.buffers, CudaBuffers):
        return CudaStepper(decoder, store, plan, state.captures if state else None)
    return HostStepper(decoder, store, plan, interrupt)


def make_store_stepper(model: Model, plan: CachePlan) -> tuple[CacheStore, Stepper]:
    """Allocate the page pools of many sequences, and what runs their steps. Raises CapacityError."""
    store = CacheStore(model.manifest, plan, model.device.buffers)
    return store, make_stepper(model.decoder, store, plan)
