"""Runs a session over pages in step with one over contiguous caches, and accounts for the pages."""

from __future__ import annotations

import random

import numpy as np
from conversation import LONGEST, Conversation

from ortolan.errors import CapacityError

BFLOAT16_NAN = 0xFFFF  # the bits, which stand for the type where arrays have none


def pages_in_use(session) -> list[int]:
    """Count the pages of each cache kind."""
    return [len(pages) for pages in session.state.pages.values()]


def check_pages(session) -> None:
    """Every page is free or the session's, once, and full layers have no more than they need."""
    page, caches = session.plan.page_size, session.feeder.caches
    for kind in session.feeder.manifest.cache_kinds:
        pages, pool = session.state.pages[kind.name], session.feeder.room.pools[kind.name]
        assert all(list(caches.page_numbers(layer)) == pages for layer in kind.layers)
        assert {len(array) for layer in kind.layers for array in caches.store.tensors[layer].values()} == {
            pool.num_pages
        }
        assert len(set(pages)) == len(pages)
        assert [pool.holders(number) for number in range(pool.num_pages)] == [
            int(number in pages) for number in range(pool.num_pages)
        ]
        assert pool.free == pool.num_pages - len(pages)
        held = max(session.feeder.held().get(layer, 0) for layer in kind.layers)
        if kind.window < 0:
            assert -(-held // page) <= len(pages) <= -(-(held + session.plan.growth_room) // page) + 1
        else:
            assert pool.free == 0


def poison_free_pages(session) -> None:
    """Fill pages that hold nothing with NaN: whoever reads one gives it away."""
    caches = session.feeder.caches
    with caches.buffers.scope():
        for index, tensors in caches.store.tensors.items():
            for array in tensors.values():
                free = sorted(set(range(len(array))) - set(caches.page_numbers(index)))
                array[free] = np.nan if array.dtype.kind == "f" else BFLOAT16_NAN


def shuffle_free_pages(session, rng: random.Random) -> None:
    for pool in session.feeder.room.pools.values():
        pages = [pool.take() for _ in range(pool.available)]
        rng.shuffle(pages)
        for page in pages:
            pool.release(page)


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
