"""Tensors of one shape share a block of memory; resizing keeps what they hold, wherever it lies."""

import dataclasses

import numpy as np
import pytest
from evict_cases import KV_HEADS, SIZE, SLOTS, WINDOW, manifest
from fake_cuda import FakeCuda

from ortolan.errors import CapacityError
from ortolan.runtime.caches.plan import plan_caches
from ortolan.runtime.caches.room import ContiguousRoom
from ortolan.runtime.caches.store import CacheStore
from ortolan.runtime.device.buffers import HostBuffers

FULL, RING = (0, 2), 1  # layers of the manifest


@pytest.fixture(params=[HostBuffers, FakeCuda])
def store(request):
    described = manifest()
    store = CacheStore(described, plan_caches(described), request.param())
    rng = np.random.default_rng(0)
    for tensors in store.tensors.values():
        for part in tensors.values():
            part[:] = rng.standard_normal(part.shape)
    return store


def parts_of(store, *layers):
    return [store.tensors[index][role] for index in layers for role in ("key", "value")]


def copied(store):
    return {index: [part.copy() for part in parts_of(store, index)] for index in store.tensors}


def assert_kept(store, before, rows):
    for index, count in rows.items():
        for part, old in zip(parts_of(store, index), before[index], strict=True):
            np.testing.assert_array_equal(part[:, :, :count], old[:, :, :count])


def owner(array):
    while array.base is not None:
        array = array.base
    return array


def test_layers_of_one_shape_lie_in_one_block(store):
    parts = parts_of(store, *FULL)
    assert len({id(owner(part)) for part in parts}) == 1
    assert owner(store.tensors[RING]["key"]) is not owner(parts[0])
    assert [part.shape for part in parts] == [(1, KV_HEADS, SLOTS, SIZE)] * 4
    for number, part in enumerate(parts):
        part[:] = number
    assert [float(part.min()) for part in parts] == [float(part.max()) for part in parts] == [0, 1, 2, 3]


@pytest.mark.parametrize("slots", [{0: 64, 2: 64}, {0: 64, 2: 32}, {0: 64}, {2: 40}])
def test_what_is_held_outlives_a_change_of_size(store, slots):
    before, generation = copied(store), store.generation
    held = {0: 30, 2: 25}
    store.resize({0: SLOTS, 2: SLOTS, **slots}, held)
    assert [store.page_slots(index) for index in FULL] == [slots.get(index, SLOTS) for index in FULL]
    assert store.generation > generation
    assert_kept(store, before, held)
    np.testing.assert_array_equal(store.tensors[RING]["key"], before[RING][0])
    store.resize({0: SLOTS, 2: SLOTS}, held)
    assert [store.page_slots(index) for index in FULL] == [SLOTS, SLOTS]
    assert_kept(store, before, held)
    assert store.bytes == sum(part.nbytes for part in parts_of(store, *store.tensors))


def test_memory_of_the_old_size_is_not_held_on_to(store):
    """Also by a layer that did not change: it shared the block."""
    old = owner(store.tensors[0]["key"])
    store.resize({0: 64, 2: SLOTS}, {0: 10, 2: 10})
    assert all(owner(part) is not old for part in parts_of(store, *store.tensors))


def test_a_fitting_cache_stays_where_it_is(store):
    places, generation = [part.ctypes.data for part in parts_of(store, *FULL)], store.generation
    store.resize({0: SLOTS, 2: SLOTS}, {0: 10, 2: 10})
    assert [part.ctypes.data for part in parts_of(store, *FULL)] == places
    assert store.generation == generation  # which says that what is bound to the arrays still is


def test_caches_stay_as_they_are_where_smaller_ones_find_no_memory(store, monkeypatch):
    def refuse(shape, dtype):
        raise CapacityError(f"no memory for shape {shape}")

    before, room = copied(store), ContiguousRoom(store)
    monkeypatch.setattr(store.buffers, "empty", refuse)
    room.shrink({0: 64, 2: 64}, {0: 30, 2: 30})
    assert [store.page_slots(index) for index in FULL] == [SLOTS, SLOTS]
    assert_kept(store, before, dict.fromkeys(FULL, SLOTS))
    with pytest.raises(CapacityError):
        room.fit({0: 128, 2: 128}, {0: 30, 2: 30})
    assert_kept(store, before, dict.fromkeys(FULL, SLOTS))
    assert room.bytes == store.bytes
    assert room.free_bytes == 0


@pytest.mark.parametrize("sequences", [1, 3])
def test_captures_are_those_of_evictable_layers_and_apart_from_one_another(store, sequences):
    captures = store.make_captures(WINDOW, sequences)
    assert list(captures) == list(FULL)
    for index, capture in captures.items():
        assert capture.shape == (sequences, WINDOW, store.manifest.layers[index].num_heads, SIZE)
        capture[:] = index
    assert [float(captures[index].mean()) for index in FULL] == [0, 2]


def test_layers_of_other_heads_have_blocks_of_their_own():
    described = manifest()
    wide = dataclasses.replace(described.layers[2], num_kv_heads=4)
    described = dataclasses.replace(described, layers=(*described.layers[:2], wide))
    store = CacheStore(described, plan_caches(described), HostBuffers())
    keys = [store.tensors[index]["key"] for index in FULL]
    assert [key.shape[1] for key in keys] == [KV_HEADS, 4]
    keys[0][:, :, :5], keys[1][:, :, :5] = 1, 2
    store.resize({0: 64, 2: 64}, {0: 5, 2: 5})
    assert [float(store.tensors[index]["key"][:, :, :5].mean()) for index in FULL] == [1, 2]
