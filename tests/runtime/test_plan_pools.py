"""How an engine's bytes are divided among page pools."""

import dataclasses

import pytest
from fake_batch import make_manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortolan.errors import CapacityError, ConfigError
from ortolan.manifest import LayerInfo, cache_kinds
from ortolan.runtime.caches.plan import plan_pools


def make_model(windows, *, page_size=16, sink=0, max_context=4096):
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8}
    layers = tuple(LayerInfo(window=window, evictable=False, **shape) for window in windows)
    return dataclasses.replace(
        make_manifest(rings=False),
        layers=layers,
        cache_kinds=cache_kinds(layers),
        page_size=page_size,
        sink=sink,
        max_context=max_context,
        rope_limits=(max_context,),
    )


@settings(max_examples=200, deadline=None)
@given(
    windows=st.lists(st.sampled_from([-1, 20, 512]), min_size=1, max_size=5),
    page_size=st.sampled_from([16, 32, 64, 128, 256]),
    sink=st.integers(0, 8),
    sequences=st.integers(1, 40),
    chunk=st.integers(1, 3000),
    context=st.integers(1, 4096),
    budget=st.one_of(st.none(), st.integers(1, 10**8)),
    cuda=st.booleans(),
)
def test_plans_fit_their_bytes_and_serve(windows, page_size, sink, sequences, chunk, context, budget, cuda):
    manifest = make_model(windows, page_size=page_size, sink=sink)
    try:
        plan = plan_pools(manifest, sequences, budget, chunk, context, cuda=cuda)
    except CapacityError:
        one = plan_pools(manifest, 1, None, chunk, context, cuda=cuda)
        assert budget is not None
        assert budget < one.bytes
        return
    assert budget is None or plan.bytes <= budget
    assert plan.bytes == sum(kind.num_pages * kind.page_bytes for kind in plan.kinds)
    for kind in plan.kinds:
        slots = kind.table_pages * page_size
        assert kind.num_pages >= 1
        if kind.grows:
            assert slots >= context
            continue
        assert slots >= sink + kind.window
        assert slots >= min(sink + kind.window - 1 + chunk, context)
        assert kind.num_pages >= kind.pages_for(context)
        assert slots % (128 if cuda else 64) == 0 or (not cuda and slots >= context)  # it never wraps


def test_without_a_limit_all_sequences_fit():
    plan = plan_pools(make_model([-1, 20, 20]), 5, None, 100, 1000)
    snapshots = sum(kind.snapshot_pages * kind.page_bytes for kind in plan.kinds)
    assert plan.bytes == 5 * plan.sequence_bytes(1000) + snapshots


def test_snapshots_get_an_eighth_of_what_full_attention_has():
    manifest = make_model([-1, 20, 20])
    plan = plan_pools(manifest, 5, None, 100, 1000)
    full, ring = plan.kinds
    one = ring.pages_for(1000) * ring.page_bytes
    assert (full.snapshot_pages, full.num_pages) == (0, 5 * full.pages_for(1000))
    count = full.bytes // 8 // one
    assert 1 <= count < 5
    assert ring.snapshot_pages == count * ring.pages_for(1000)
    assert ring.num_pages == (5 + count) * ring.pages_for(1000)
    bounded = plan_pools(manifest, 5, plan.bytes // 2, 100, 1000)
    assert bounded.bytes <= plan.bytes // 2
    assert 0 < bounded.kinds[1].snapshot_pages * ring.page_bytes <= bounded.bytes // 8
    smallest = plan_pools(manifest, 5, plan.sequence_bytes(1000), 100, 1000)
    assert smallest.kinds[1].snapshot_pages == 0  # the longest sequence comes first


def test_rings_leave_room_for_full_attention():
    manifest = make_model([-1, 512, 512, 512])
    one = plan_pools(manifest, 1, None, 256, 4096)
    full, ring = one.kinds
    plan = plan_pools(manifest, 1000, 4 * one.bytes, 256, 4096)
    ringed = plan.kinds[1].num_pages / ring.num_pages
    assert 4 < ringed < 1000
    assert plan.kinds[0].num_pages * 4 >= ringed * full.num_pages
    assert plan_pools(manifest, 1000, one.bytes, 256, 4096).kinds[0].num_pages >= full.num_pages


def test_rings_hold_far_more_sequences_than_full_length_caches():
    """The layout of Gemma 3 1B: of 26 layers every sixth attends to everything."""
    windows = [-1 if layer % 6 == 5 else 512 for layer in range(26)]
    manifest = make_model(windows, page_size=64, max_context=32768)
    full_length = 32768 * 26 * 2 * 2 * 8 * 4
    plan = plan_pools(manifest, 1, None, 512, 32768, cuda=True)
    assert full_length / plan.sequence_bytes(32768) > 4


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_sequences": 0}, ConfigError),
        ({"max_sequences": True}, ConfigError),
        ({"max_sequences": 2, "chunk_tokens": 0}, ConfigError),
        ({"max_sequences": 2, "max_context": 4097}, ConfigError),
        ({"max_sequences": 2, "max_cache_bytes": 0}, ConfigError),
        ({"max_sequences": 2, "max_cache_bytes": 100}, CapacityError),
    ],
)
def test_numbers_that_make_no_sense_are_refused(arguments, error):
    with pytest.raises(error):
        plan_pools(make_model([-1, 20]), **arguments)


def test_more_sequences_than_the_bytes_could_ever_hold_are_planned_at_once():
    """No more rings are tried than there are bytes for."""
    plan = plan_pools(make_model([-1, 20]), 2**31 - 1, 2**24, 16)
    assert plan.bytes <= 2**24
