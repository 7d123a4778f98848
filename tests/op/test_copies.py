"""RingKvAppend, SnapKvCapture and KvCompact copy bit for bit."""

import devices
import numpy as np
import pytest
from harness import empty_caches, random_batch, run_in_place, run_op

from ortolan.custom_ops import reference

pytestmark = pytest.mark.usefixtures("target")


def append_feeds(batch, caches, **extra):
    return {
        "key": batch.key,
        "value": batch.value,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "query_start": batch.query_start,
        "past_len": batch.past_len,
        **extra,
    }


def shuffled_block_table(rng, sequences, pages_each):
    return rng.permutation(sequences * pages_each).astype(np.int32).reshape(sequences, pages_each)


@pytest.mark.parametrize("sink", [0, 1, 5])
@pytest.mark.parametrize("tokens", [[1, 1], [30, 7], [33, 0], [100, 64]])
def test_append_writes_what_the_reference_writes(sink, tokens):
    rng = np.random.default_rng(sum(tokens) + sink)
    caches = empty_caches(2, 2, 32, 16)
    batch = random_batch(rng, tokens, [3, 61])
    feeds = append_feeds(batch, caches)
    expected = reference.ring_kv_append(**feeds, sink=sink)
    in_place = run_in_place("RingKvAppend", feeds, sink=sink)
    copied = run_op("RingKvAppend", feeds, sink=sink)
    for got in (list(in_place.values()), copied):
        devices.assert_same_bits(got[0], expected[0])
        devices.assert_same_bits(got[1], expected[1])
    assert np.isnan(feeds["key_cache"]).all(), "a cache bound to its input alone was changed"


@pytest.mark.parametrize("page", [16, 32])
def test_paged_append_equals_contiguous(page):
    rng = np.random.default_rng(page)
    batch = random_batch(rng, [40, 9], [70, 3])
    contiguous = run_op("RingKvAppend", append_feeds(batch, empty_caches(2, 2, 64, 16)), sink=4)
    table = shuffled_block_table(rng, 2, 64 // page)
    pool = empty_caches(2 * 64 // page, 2, page, 16)
    paged = run_op("RingKvAppend", append_feeds(batch, pool, block_table=table), sink=4)
    for got, want in zip(paged, contiguous, strict=True):
        gathered = got[table].transpose(0, 2, 1, 3, 4).reshape(want.shape)
        devices.assert_same_bits(gathered, want)


@pytest.mark.parametrize("gone", [-1, 10**6])
def test_append_follows_the_pages_that_it_writes(gone):
    """Only the second page of the first sequence is written; the other sequence has no tokens in this step."""
    batch = random_batch(np.random.default_rng(0), [5, 0], [20, 40])
    table = np.array([[gone, 2, gone, gone], [gone] * 4], np.int32)
    feeds = append_feeds(batch, empty_caches(3, 2, 16, 16), block_table=table)
    expected = reference.ring_kv_append(**feeds, sink=4)
    for got, want in zip(run_op("RingKvAppend", feeds, sink=4), expected, strict=True):
        devices.assert_same_bits(got, want)


def test_append_takes_a_length_per_kv_head():
    rng = np.random.default_rng(0)
    batch = random_batch(rng, [5, 2], [0, 0])
    feeds = append_feeds(batch, empty_caches(2, 2, 16, 16)) | {"past_len": np.array([[1, 9], [0, 4]], np.int32)}
    expected = reference.ring_kv_append(**feeds)
    for got, want in zip(run_op("RingKvAppend", feeds), expected, strict=True):
        devices.assert_same_bits(got, want)


@pytest.mark.parametrize("tokens", [[1, 3], [8, 20], [0, 9]])
def test_capture_keeps_the_last_queries(tokens):
    rng = np.random.default_rng(1)
    batch = random_batch(rng, tokens, [5, 17])
    feeds = {
        "query": batch.query,
        "capture": np.full((2, 8, 4, 16), np.nan, devices.element()),
        "query_start": batch.query_start,
        "past_len": batch.past_len,
    }
    expected = reference.snapkv_capture(**feeds)
    devices.assert_same_bits(run_op("SnapKvCapture", feeds)[0], expected)
    devices.assert_same_bits(run_in_place("SnapKvCapture", feeds)["capture_out"], expected)


def test_capture_of_no_rows_is_a_no_op():
    batch = random_batch(np.random.default_rng(2), [3], [0])
    feeds = {
        "query": batch.query,
        "capture": np.zeros((1, 0, 4, 16), devices.element()),
        "query_start": batch.query_start,
        "past_len": batch.past_len,
    }
    assert run_op("SnapKvCapture", feeds)[0].shape == (1, 0, 4, 16)


@pytest.mark.parametrize("heads", [1, 2])
def test_compaction_is_safe_in_place(heads):
    rng = np.random.default_rng(heads)
    caches = [rng.standard_normal((3, 2, 40, 16)).astype(devices.element()) for _ in range(2)]
    keep = np.full((3, heads, 20), -1, np.int32)
    for lists, count in zip(keep, (20, 7, 0), strict=True):
        for positions in lists:
            positions[:count] = np.sort(rng.choice(40, count, replace=False))
    feeds = {"key_cache": caches[0], "value_cache": caches[1], "keep": keep}
    expected = reference.kv_compact(**feeds)
    in_place = run_in_place("KvCompact", feeds)
    for got in (list(in_place.values()), run_op("KvCompact", feeds)):
        devices.assert_same_bits(got[0], expected[0])
        devices.assert_same_bits(got[1], expected[1])


def test_compaction_follows_the_pages_that_it_moves():
    """Pages 1 and 3 hold no row that is kept and none to be written."""
    rng = np.random.default_rng(4)
    caches = [rng.standard_normal((2, 2, 16, 8)).astype(devices.element()) for _ in range(2)]
    feeds = {
        "key_cache": caches[0],
        "value_cache": caches[1],
        "keep": np.array([[[0, 9, 32, 40, -1]]], np.int32),
        "block_table": np.array([[1, -1, 0, 10**6]], np.int32),
    }
    for got, want in zip(run_op("KvCompact", feeds), reference.kv_compact(**feeds), strict=True):
        devices.assert_same_bits(got, want)


def test_compaction_follows_pages():
    rng = np.random.default_rng(3)
    table = shuffled_block_table(rng, 2, 4)
    caches = [rng.standard_normal((8, 2, 16, 8)).astype(devices.element()) for _ in range(2)]
    keep = np.sort(rng.permuted(np.tile(np.arange(64, dtype=np.int32), (2, 2, 1)), axis=2)[..., :30], axis=2)
    feeds = {"key_cache": caches[0], "value_cache": caches[1], "keep": keep, "block_table": table}
    for got, want in zip(run_op("KvCompact", feeds), reference.kv_compact(**feeds), strict=True):
        devices.assert_same_bits(got, want)
