"""RingKvAppend, SnapKvCapture and KvCompact equal the reference bit for bit, whatever the sizes and chunks."""

import itertools

import devices
import numpy as np
import pytest
from attention_cases import block_table, run_cached
from harness import empty_caches, random_batch, run_in_place
from hypothesis import given, settings
from hypothesis import strategies as st

from ortolan.custom_ops import reference

HEADS, SIZE = 2, 8
pytestmark = pytest.mark.usefixtures("target")


def assert_same_bits(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        devices.assert_same_bits(got, want)


@st.composite
def append_steps(draw):
    """Draw a cache and one step of a batch: ring or not, paged or not, a length per sequence or per kv head."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    tokens = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    page, pages = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    slots = page * pages
    capacity = draw(st.sampled_from([0, slots, draw(st.integers(1, slots))]))
    sink = draw(st.integers(0, (capacity or slots) - 1))
    past = draw(st.lists(st.integers(0, 60), min_size=len(tokens) * HEADS, max_size=len(tokens) * HEADS))
    batch = random_batch(rng, tokens, past[: len(tokens)], kv_heads=HEADS, head_size=SIZE)
    feeds = {"key": batch.key, "value": batch.value}
    paged = draw(st.booleans())
    shape = (len(tokens) * pages + 2, HEADS, page, SIZE) if paged else (len(tokens), HEADS, slots, SIZE)
    feeds |= dict(zip(("key_cache", "value_cache"), empty_caches(*shape), strict=True))
    feeds["query_start"] = batch.query_start
    per_head = draw(st.booleans())
    feeds["past_len"] = np.array(past, np.int32).reshape(-1, HEADS) if per_head else batch.past_len
    if paged:
        feeds["block_table"] = block_table(len(tokens), pages, rng)
    return feeds, {"sink": sink, "capacity": capacity}


@settings(max_examples=60, deadline=None)
@given(step=append_steps())
def test_append_equals_the_reference(step):
    feeds, attributes = step
    expected = reference.ring_kv_append(**feeds, **attributes)
    assert_same_bits(run_cached("RingKvAppend", feeds, **attributes), expected)
    assert np.isnan(feeds["key_cache"]).all(), "a cache that is bound as an input alone was changed"


@settings(max_examples=20, deadline=None)
@given(step=append_steps())
def test_append_in_place_equals_the_reference(step):
    feeds, attributes = step
    expected = reference.ring_kv_append(**feeds, **attributes)
    assert_same_bits(run_in_place("RingKvAppend", feeds, **attributes).values(), expected)


@settings(max_examples=30, deadline=None)
@given(step=append_steps(), cuts=st.lists(st.integers(0, 40), max_size=3))
def test_append_in_chunks_equals_one_block(step, cuts):
    feeds, attributes = step
    first, last = int(feeds["query_start"][0]), int(feeds["query_start"][1])
    one = {k: v for k, v in feeds.items() if k != "block_table"}  # the first sequence alone
    table = {k: v[:1] for k, v in feeds.items() if k == "block_table"}
    if not table:
        one |= {k: one[k][:1] for k in ("key_cache", "value_cache")}
    rows = {k: feeds[k][first:last] for k in ("key", "value")}
    past, count = feeds["past_len"][:1], last - first
    lengths = {"query_start": np.array([0, count], np.int32), "past_len": past}
    whole = run_cached("RingKvAppend", {**one, **rows, **lengths, **table}, **attributes)
    caches = [one["key_cache"], one["value_cache"]]
    for begin, end in itertools.pairwise(sorted({0, count, *(min(c, count) for c in cuts)})):
        chunk = {k: v[begin:end] for k, v in rows.items()}
        chunk |= dict(zip(("key_cache", "value_cache"), caches, strict=True))
        chunk |= {"query_start": np.array([0, end - begin], np.int32), "past_len": past + np.int32(begin)}
        caches = run_cached("RingKvAppend", {**chunk, **table}, **attributes)
    assert_same_bits(caches, whole)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    rows=st.integers(1, 20),
    past=st.integers(0, 50),
    seed=st.integers(0, 2**16),
)
def test_capture_equals_the_reference_and_a_token_loop(tokens, rows, past, seed):
    lengths = [past + 3 * b for b in range(len(tokens))]
    batch = random_batch(np.random.default_rng(seed), tokens, lengths, head_size=SIZE)
    empty = np.full((len(tokens), rows, 4, SIZE), np.nan, devices.element())
    feeds = {"query": batch.query, "capture": empty, "query_start": batch.query_start, "past_len": batch.past_len}
    block = run_cached("SnapKvCapture", feeds)
    assert_same_bits(block, [reference.snapkv_capture(**feeds)])
    captured = empty
    for token in range(max(tokens)):  # step `token` feeds one query of each sequence that has one
        fed = [b for b, count in enumerate(tokens) if token < count]
        counts = np.array([b in fed for b in range(len(tokens))], np.int32)
        step = {
            "query": batch.query[[batch.query_start[b] + token for b in fed]],
            "capture": captured,
            "query_start": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            "past_len": batch.past_len + np.minimum(token, tokens).astype(np.int32),
        }
        captured = run_cached("SnapKvCapture", step)[0]
    assert_same_bits([captured], block)


@st.composite
def compactions(draw):
    """Draw a full pool and keep-lists of uneven lengths, shared by all heads or not, paged or not."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    sequences, page, pages = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    slots = page * pages
    paged = draw(st.booleans())
    shape = (sequences * pages + 2, HEADS, page, SIZE) if paged else (sequences, HEADS, slots, SIZE)
    width = draw(st.integers(0, slots))
    keep = np.full((sequences, draw(st.sampled_from([1, HEADS])), width), -1, np.int32)
    for index in np.ndindex(keep.shape[:2]):
        count = draw(st.integers(0, width))
        keep[index][:count] = np.sort(rng.choice(slots, count, replace=False))
    feeds = {name: rng.standard_normal(shape).astype(devices.element()) for name in ("key_cache", "value_cache")}
    table = {"block_table": block_table(sequences, pages, rng)} if paged else {}
    return {**feeds, "keep": keep, **table}


@settings(max_examples=40, deadline=None)
@given(feeds=compactions())
def test_compaction_equals_the_reference(feeds):
    assert_same_bits(run_cached("KvCompact", feeds), reference.kv_compact(**feeds))


@settings(max_examples=20, deadline=None)
@given(feeds=compactions())
def test_compaction_in_place_equals_the_reference(feeds):
    assert_same_bits(run_in_place("KvCompact", feeds).values(), reference.kv_compact(**feeds))
