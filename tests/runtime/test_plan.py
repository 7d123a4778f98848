"""Plans are right for every length: brute force stands beside the formulas."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortolan.custom_ops.reference import slot_of
from ortolan.runtime.plan import LayerPlan, plan_caches, ring_capacity, ring_keeps, split_chunks

from ortolan.errors import ConfigError
from ortolan.manifest import LayerInfo, Manifest


def manifest(**changes) -> Manifest:
    values = {
        "architecture": "test",
        "dtype": "float16",
        "vocab_size": 10,
        "num_heads": 4,
        "max_context": 4096,
        "chunk_size": 128,
        "sink": 0,
        "snapkv_window": 64,
        "paged": False,
        "layers": (
            LayerInfo(window=100, num_kv_heads=2, head_size=16, evictable=False),
            LayerInfo(window=-1, num_kv_heads=2, head_size=16, evictable=True),
        ),
        "rope_limits": (4096,),
    }
    return Manifest(**{**values, **changes})


def test_a_ring_holds_window_and_chunk_and_a_full_cache_the_context():
    plan = plan_caches(manifest())
    ring, full = plan.layers
    assert (ring.kind, ring.capacity) == ("ring", 256)
    assert (full.kind, full.capacity) == ("full", 4096)
    assert full.bytes == 4096 * 2 * 2 * 16 * 2
    assert plan.bytes == ring.bytes + full.bytes
    assert plan.full_length_bytes == 2 * full.bytes


def test_short_contexts_take_no_more_than_they_need():
    plan = plan_caches(manifest(), max_context=150)
    assert [layer.capacity for layer in plan.layers] == [150, 150]


@pytest.mark.parametrize("name", ["max_context", "chunk_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_numbers_are_checked(name, value):
    with pytest.raises(ConfigError, match=name):
        plan_caches(manifest(), **{name: value})


def test_a_context_beyond_the_export_is_refused():
    with pytest.raises(ConfigError, match="export it again"):
        plan_caches(manifest(), max_context=4097)


@given(count=st.integers(1, 500), chunk=st.integers(1, 600))
def test_chunks_cover_the_prompt(count, chunk):
    parts = list(split_chunks(count, chunk))
    assert [i for begin, end in parts for i in range(begin, end)] == list(range(count))
    assert all(0 < end - begin <= chunk for begin, end in parts)


@given(sink=st.integers(0, 9), window=st.integers(1, 300), chunk=st.integers(1, 300))
def test_ring_capacity_is_exact_enough(sink, window, chunk):
    capacity = ring_capacity(sink, window, chunk)
    assert capacity >= sink + window - 1 + chunk
    assert capacity % 64 == 0


@settings(max_examples=300)
@given(
    sink=st.integers(0, 4),
    window=st.integers(1, 12),
    extra=st.integers(0, 10),
    highest=st.integers(1, 60),
    data=st.data(),
)
def test_ring_keeps_agrees_with_brute_force(sink, window, extra, highest, data):
    length = data.draw(st.integers(0, highest))
    capacity = sink + window + extra
    layer = LayerPlan(kind="ring", window=window, capacity=capacity, slot_bytes=1, full_length_bytes=1)
    holder = {slot_of(j, capacity, sink): j for j in range(highest)}
    wanted = [j for j in range(max(0, length - window + 1), length)] + list(range(min(sink, length)))
    assert ring_keeps(length, highest, layer, sink) == all(
        holder[slot_of(j, capacity, sink)] == j for j in wanted
    )
