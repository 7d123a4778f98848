"""Cache plans and chunks, without ONNX Runtime."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan.errors import CapacityError, ConfigError
from ortolan.manifest import LayerInfo, Manifest
from ortolan.policies import Eviction, SnapKv
from ortolan.runtime.caches.attention import ring_keeps
from ortolan.runtime.caches.plan import plan_caches, rope_variant
from ortolan.runtime.device.memory import estimate_evict_bytes, fit_chunk
from ortolan.runtime.steps.cuts import ANYWHERE

SIZES = st.integers(1, 40)


def manifest_of(window: int = 12, sink: int = 0, max_context: int = 512, dtype: str = "float32") -> Manifest:
    layers = tuple(LayerInfo(window=w, num_heads=4, num_kv_heads=2, head_size=8, evictable=w < 0) for w in (window, -1))
    return Manifest(
        architecture="test",
        dtype=dtype,
        vocab_size=10,
        max_context=max_context,
        chunk_size=64,
        sink=sink,
        snapkv_window=8,
        paged=False,
        layers=layers,
        rope_limits=(max_context,),
    )


def slot(position: int, sink: int, capacity: int) -> int:
    return position if position < sink else sink + (position - sink) % (capacity - sink)


@given(window=SIZES, sink=st.integers(0, 5), chunk=SIZES, context=st.integers(1, 300))
def test_a_ring_holds_all_that_a_chunk_sees(window, sink, chunk, context):
    ring, full = plan_caches(manifest_of(window, sink), context, chunk).layers
    assert (ring.kind, full.kind) == ("ring", "full")
    largest_chunk = min(chunk, context)
    assert ring.capacity >= min(sink + window - 1 + largest_chunk, max(context, sink + window))
    assert ring.capacity >= sink + window
    assert full.capacity >= context


def test_a_ring_is_not_larger_than_the_context_and_a_multiple_of_the_tile():
    assert plan_caches(manifest_of(12), 512, 64).layers[0].capacity == 128
    assert plan_caches(manifest_of(12), 40, 64).layers[0].capacity == 40


def test_bytes_count_keys_and_values():
    for dtype, element in (("float32", 4), ("bfloat16", 2)):
        plan = plan_caches(manifest_of(dtype=dtype), 512, 64)
        slot_bytes = 2 * 2 * 8 * element
        assert [layer.bytes for layer in plan.layers] == [128 * slot_bytes, 512 * slot_bytes]
        assert plan.bytes == 640 * slot_bytes
        assert plan.full_length_bytes == 1024 * slot_bytes


@given(context=st.integers(1, 512), chunk=st.integers(1, 600), budget=st.integers(1, 600), cuda=st.booleans())
def test_evictions_during_prefill_bound_the_full_attention_caches_alone(context, chunk, budget, cuda):
    plan = plan_caches(manifest_of(), context, chunk, cuda=cuda, budget=budget)
    usual = plan_caches(manifest_of(), context, chunk, cuda=cuda)
    assert plan.bound == min(context, budget + chunk)
    assert 0 <= plan.layers[1].capacity - plan.bound < (plan.slot_tile if cuda else 1)
    assert plan.layers[1].capacity <= usual.layers[1].capacity
    assert plan.layers[0] == usual.layers[0]
    assert plan.full_length_bytes == usual.full_length_bytes
    planned = plan.layers[1].capacity
    assert plan.grown_capacity(1, 1) == plan.evicted_capacity(planned, 1, is_first=True) == planned


@pytest.mark.parametrize("cuda", [False, True])
def test_the_first_eviction_gives_all_back_and_later_ones_leave_what_decoding_grew(cuda):
    plan = plan_caches(manifest_of(max_context=16_384), 16_384, 64, cuda=cuda)
    assert plan.evicted_capacity(16_384, 2048, is_first=True) == 2048
    for question in (1, plan.growth_room // 2):
        grown = plan.grown_capacity(1, 2048 + question)
        assert grown >= 2048 + question + plan.growth_room
        assert plan.evicted_capacity(grown, 2048, is_first=True) == 2048
        assert plan.evicted_capacity(grown, 2048, is_first=False) == grown
    assert plan.evicted_capacity(8192, 2048, is_first=False) == 2048


def test_defaults_come_from_the_manifest():
    plan = plan_caches(manifest_of())
    assert (plan.max_context, plan.chunk_size) == (512, 64)


@pytest.mark.parametrize(
    ("options", "context", "expected"),
    [
        ({}, 32_768, 16_384),
        ({}, 300, 300),
        ({}, 60, 64),
        ({"cuda": False}, 32_768, 64),
        ({"budget": 128}, 32_768, 64),
        ({"chunk_size": 7}, 32_768, 7),
    ],
)
def test_where_nobody_chose_cuda_reads_large_chunks_that_no_cache_grows_with(options, context, expected):
    unchosen = dataclasses.replace(manifest_of(window=-1, max_context=32_768), chunk_chosen=False)
    ringed = dataclasses.replace(manifest_of(max_context=32_768), chunk_chosen=False)
    chosen = dataclasses.replace(unchosen, chunk_chosen=True)
    options = {"cuda": True} | options
    assert plan_caches(unchosen, context, **options).chunk_size == expected
    for manifest in (ringed, chosen):
        assert plan_caches(manifest, context, **options).chunk_size == options.get("chunk_size", 64)


@pytest.mark.parametrize(
    ("most", "expected"), [(10**9, 16_384), (16_384, 16_384), (16_383, 8192), (5000, 4096), (50, 64)]
)
def test_a_chunk_is_halved_until_there_is_room(most, expected):
    def check(plan):
        if plan.chunk_size > most:
            raise CapacityError("too little memory")

    wide = plan_caches(manifest_of(window=-1, max_context=32_768), chunk_size=16_384, cuda=True)
    plan = fit_chunk(wide, 64, check)
    assert plan == dataclasses.replace(wide, chunk_size=expected)


@pytest.mark.parametrize("name", ["max_context", "chunk_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_refuses_sizes_that_are_no_positive_whole_numbers(name, value):
    unchosen = dataclasses.replace(manifest_of(window=-1), chunk_chosen=False)
    for manifest, cuda in ((manifest_of(), False), (unchosen, True)):
        with pytest.raises(ConfigError, match=name):
            plan_caches(manifest, **{name: value}, cuda=cuda)


def test_refuses_a_context_beyond_the_export():
    with pytest.raises(ConfigError, match=r"513.*512"):
        plan_caches(manifest_of(), 513)


@given(count=st.integers(1, 500), chunk=SIZES)
def test_chunks_cover_the_prompt_once_and_in_order(count, chunk):
    ranges = list(ANYWHERE.pieces(count, chunk))
    assert list(itertools.chain.from_iterable(range(*r) for r in ranges)) == list(range(count))
    assert all(0 < end - begin <= chunk for begin, end in ranges)


def test_a_length_at_a_limit_still_has_the_variant_of_that_limit():
    assert [rope_variant((8, 64), length) for length in (0, 1, 8, 9, 64)] == [0, 0, 0, 1, 1]


@given(
    sink=st.integers(0, 3),
    window=st.integers(1, 8),
    spare=st.integers(0, 12),
    highest=st.integers(1, 60),
    back=st.integers(0, 60),
)
def test_ring_keeps_agrees_with_brute_force(sink, window, spare, highest, back):
    capacity = sink + window + spare
    length = max(0, highest - back)
    held = np.full(capacity, -1)
    for position in range(highest):
        held[slot(position, sink, capacity)] = position
    seen = [p for p in range(length) if p < sink or p > length - window]
    whole = all(held[slot(p, sink, capacity)] == p for p in seen)
    assert ring_keeps(length, highest, window, capacity, sink) == whole


def test_an_eviction_is_counted_by_the_largest_cache_that_it_reads():
    manifest = manifest_of()
    long, bounded = plan_caches(manifest, 512), plan_caches(manifest, 512, 64, budget=100)
    assert estimate_evict_bytes(manifest, long, None) == 0
    usual, expected = SnapKv(), Eviction(policy="expected")
    scores = estimate_evict_bytes(manifest, long, usual)
    assert scores == 32 * 512 * 2 * 4  # [Hkv, C]
    assert estimate_evict_bytes(manifest, long, expected) - scores == 2 * 4 * 512 * 8 * 4  # two [Hq, C, D] float32
    for options in (usual, expected):
        assert 512 * estimate_evict_bytes(manifest, bounded, options) == 164 * estimate_evict_bytes(
            manifest, long, options
        )
