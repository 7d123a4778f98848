"""Cache buffers of one shape share a block of memory; resizing keeps what they hold, wherever it lies."""

import dataclasses

import numpy as np
import pytest
from evict_cases import KV_HEADS, SIZE, SLOTS, manifest
from fake_cuda import FakeCuda

from ortolan.errors import CapacityError
from ortolan.runtime.caches import CacheBuffers
from ortolan.runtime.caches.plan import plan_caches
from ortolan.runtime.device.buffers import HostBuffers

FULL, RING = (0, 2), 1  # layers of the manifest


@pytest.fixture(params=[HostBuffers, FakeCuda])
def caches(request):
    described = manifest()
    caches = CacheBuffers(described, plan_caches(described), 8, request.param())
    rng = np.random.default_rng(0)
    for layer in caches.layers:
        for part in (layer.key, layer.value):
            part[:] = rng.standard_normal(part.shape)
    return caches


def copied(caches):
    return [[part.copy() for part in (layer.key, layer.value)] for layer in caches.layers]


def assert_kept(caches, before, rows):
    for index, count in rows.items():
        layer = caches.layers[index]
        for part, old in zip((layer.key, layer.value), before[index], strict=True):
            np.testing.assert_array_equal(part[:, :, :count], old[:, :, :count])


def owner(array):
    while array.base is not None:
        array = array.base
    return array


def test_layers_of_one_shape_lie_in_one_block(caches):
    parts = [part for index in FULL for part in (caches.layers[index].key, caches.layers[index].value)]
    assert len({id(owner(part)) for part in parts}) == 1
    assert owner(caches.layers[RING].key) is not owner(parts[0])
    assert [part.shape for part in parts] == [(1, KV_HEADS, SLOTS, SIZE)] * 4
    for number, part in enumerate(parts):
        part[:] = number
    assert [float(part.min()) for part in parts] == [float(part.max()) for part in parts] == [0, 1, 2, 3]


@pytest.mark.parametrize("slots", [{0: 64, 2: 64}, {0: 64, 2: 32}, {0: 64}, {2: 40}])
def test_what_is_held_outlives_a_change_of_size(caches, slots):
    before, generation = copied(caches), caches.generation
    held = {0: 30, 2: 25}
    caches.fit({0: SLOTS, 2: SLOTS, **slots}, held)
    assert [caches.capacity(index) for index in FULL] == [slots.get(index, SLOTS) for index in FULL]
    assert caches.generation > generation
    assert_kept(caches, before, held)
    np.testing.assert_array_equal(caches.layers[RING].key, before[RING][0])
    caches.fit({0: SLOTS, 2: SLOTS}, held)
    assert [caches.capacity(index) for index in FULL] == [SLOTS, SLOTS]
    assert_kept(caches, before, held)
    assert caches.bytes == sum(part.nbytes for layer in caches.layers for part in (layer.key, layer.value))


def test_memory_of_the_old_size_is_not_held_on_to(caches):
    """Also by a layer that did not change: it shared the block."""
    old = owner(caches.layers[0].key)
    caches.fit({0: 64, 2: SLOTS}, {0: 10, 2: 10})
    assert all(owner(part) is not old for layer in caches.layers for part in (layer.key, layer.value))


def test_a_fitting_cache_stays_where_it_is(caches):
    places, generation = [layer.key.ctypes.data for layer in caches.layers], caches.generation
    caches.eviction = "bound"
    caches.fit({0: SLOTS, 2: SLOTS}, {0: 10, 2: 10})
    assert [layer.key.ctypes.data for layer in caches.layers] == places
    assert (caches.generation, caches.eviction) == (generation, "bound")


def test_caches_stay_as_they_are_where_smaller_ones_find_no_memory(caches, monkeypatch):
    def refuse(shape, dtype):
        raise CapacityError(f"no memory for shape {shape}")

    before = copied(caches)
    monkeypatch.setattr(caches.buffers, "empty", refuse)
    caches.shrink({0: 64, 2: 64}, {0: 30, 2: 30})
    assert [caches.capacity(index) for index in FULL] == [SLOTS, SLOTS]
    assert_kept(caches, before, dict.fromkeys(FULL, SLOTS))
    with pytest.raises(CapacityError):
        caches.fit({0: 128, 2: 128}, {0: 30, 2: 30})
    assert_kept(caches, before, dict.fromkeys(FULL, SLOTS))


def test_copied_captures_are_restored(caches):
    for index, capture in caches.captures.items():
        capture[:] = index
    copies = caches.copy_captures()
    assert sorted(copies) == list(FULL)
    for capture in caches.captures.values():
        capture[:] = -1
    caches.restore_captures(copies)
    assert [float(caches.captures[index].mean()) for index in FULL] == [0, 2]
    assert caches.capture_bytes == sum(capture.nbytes for capture in caches.captures.values())


def test_layers_of_other_heads_have_blocks_of_their_own():
    described = manifest()
    wide = dataclasses.replace(described.layers[2], num_kv_heads=4)
    described = dataclasses.replace(described, layers=(*described.layers[:2], wide))
    caches = CacheBuffers(described, plan_caches(described), 8, HostBuffers())
    assert [caches.layers[index].key.shape[1] for index in FULL] == [KV_HEADS, 4]
    caches.layers[0].key[:, :, :5], caches.layers[2].key[:, :, :5] = 1, 2
    caches.fit({0: 64, 2: 64}, {0: 5, 2: 5})
    assert [float(caches.layers[index].key[:, :, :5].mean()) for index in FULL] == [1, 2]
