"""Runs a session over pages in step with one over contiguous caches, and accounts for the pages."""

from __future__ import annotations

import random

import numpy as np
from conversation import LONGEST, Conversation

from ortolan.errors import CapacityError
from ortolan.runtime.device.cuda import CudaBuffers
from ortolan.runtime.paged_caches import NO_PAGE, PageTable

BFLOAT16_NAN = 0xFFFF  # the bits, which stand for the type where arrays have none


def tables_of(session) -> list[PageTable]:
    return list(session._caches._tables.values())


def check_pages(session) -> None:
    """Every page is free or in the table once, the table says which, and full layers hold no more than they need."""
    page, on_device = session.plan.page_size, isinstance(session._caches.buffers, CudaBuffers)
    for kind in session._manifest.cache_kinds:
        table = session._caches._tables[kind.name]
        pool = session._caches.layers[kind.layers[0]].key.shape[0]
        assert sorted(table._free + table._pages) == list(range(pool))
        array = session._caches.buffers.download(table.array) if on_device else table.array
        assert np.array_equal(array[0], table._pages + [NO_PAGE] * (pool - table.used))
        held = max(session._lengths.held().get(i, 0) for i in kind.layers)
        if kind.window < 0:
            assert -(-held // page) <= table.used <= -(-(held + session.plan.growth_room) // page) + 1
        else:
            assert table.free == 0


def poison_free_pages(session) -> None:
    """Fill pages that hold nothing with NaN: whoever reads one gives it away."""
    with session._caches.buffers.scope():
        for index, layer in enumerate(session._caches.layers):
            free = session._caches._table(index)._free
            for pool in (layer.key, layer.value):
                pool[free] = np.nan if pool.dtype.kind == "f" else BFLOAT16_NAN


def shuffle_free_pages(session, rng: random.Random) -> None:
    for table in tables_of(session):
        rng.shuffle(table._free)


def outcome(action):
    try:
        return action()
    except CapacityError as error:
        return type(error)


def talk_in_step(sessions: list, seed: int) -> int:
    """Let a contiguous and a paged session have the same random turns, and compare them after each.

    Returns:
        How many turns there were; they end early where the rings lost what a turn needs.
    """
    rng = random.Random(seed)
    contiguous, paged = sessions
    shuffle_free_pages(paged, rng)
    talks = [Conversation(session, random.Random(seed)) for session in sessions]
    rings = [[layer.capacity for layer in session.plan.layers if layer.kind == "ring"] for session in sessions]
    for turn in range(rng.randint(4, 14)):
        if contiguous.logical_length > LONGEST:
            return turn
        name = rng.choice(["prefill", "step", "generate", "rewind"]) if talks[0].turns else "prefill"
        results = [outcome(getattr(talk, name)) for talk in talks]
        check_pages(paged)
        poison_free_pages(paged)
        failed = [result is CapacityError for result in results]
        if any(failed) or talks[0].turns != talks[1].turns:  # a rewind that the rings refuse changes nothing
            assert all(failed) or rings[0] != rings[1], "only larger rings may hold more"
            return turn
        np.testing.assert_array_equal(*results)
        assert contiguous.logical_length == paged.logical_length
        for layer in range(len(paged.plan.layers)):
            np.testing.assert_equal(*(session.kept_positions(layer) for session in sessions))
    return turn + 1
