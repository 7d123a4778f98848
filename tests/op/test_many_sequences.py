"""Steps of many sequences: each gets what it gets alone, bit for bit, however tokens are spread over them."""

import dataclasses
import functools

import devices
import numpy as np
import pytest
from attention_cases import (
    Feeds,
    Shape,
    assert_each_is_as_alone,
    attention_feeds,
    expected_attention,
    one_sequence,
    plain_attention,
    run_attention,
)
from tolerances import assert_as_good_as_plain

pytestmark = pytest.mark.usefixtures("target")

PAGE_SLOTS = 64
CAPACITY = 2304  # whole pages; more than eight tiles of keys, as many as are merged before they are set down
SIZES = (0, 1, 3, 16, 40, 65)  # CUDA decode takes up to 16 tokens, or up to 64 as short chunks do

PACKINGS = {
    "mixed": [SIZES[(b * b + b // 7) % 6] for b in range(40)],
    "few among many": [16, *[0] * 17, 3, 3, 0, 5, *[1] * 10, 0, 0, 0, 2, 0, 0],
    "a token each": [1] * 40,
    "16 tokens each": [16] * 40,
    "behind a chunk": [1, 300, 0, 5, 16, 2, 64],
    "chunks alone": [70, 0, 129],
    "chunks and short ones": [65, 0, 40, 90],
    "chunks and a token": [130, 0, 1],
}


def assert_right(shape: Shape, feeds: Feeds, results: tuple[np.ndarray, ...]) -> None:
    plain, expected = plain_attention(shape, feeds), expected_attention(shape, feeds)
    for actual, by_plain, by_reference in zip(results, plain, expected, strict=True):
        assert_as_good_as_plain(actual, by_plain, by_reference)


@pytest.mark.slow
@pytest.mark.parametrize("page_slots", [0, 16])
@pytest.mark.parametrize("head_size", [64, 128])
def test_three_hundred_sequences(head_size, page_slots):
    past = [b * 7 % 61 for b in range(300)]
    shape = Shape(tokens=[1] * 300, past=past, heads=64, kv_heads=8, head_size=head_size, page_slots=page_slots)
    feeds = attention_feeds(shape)
    results = run_attention(shape, feeds)
    assert_right(shape, feeds, results)
    assert_each_is_as_alone(shape, feeds, results, [0, 1, 31, 32, 157, 298, 299])


@functools.lru_cache(maxsize=1)
def draw_history(kv_heads: int, head_size: int) -> np.ndarray:
    """Draw rows that all sequences take turns with, [2, Hkv, CAPACITY, D] float32."""
    return np.random.default_rng(0).standard_normal((2, kv_heads, CAPACITY, head_size), np.float32)


def long_feeds(shape: Shape) -> Feeds:
    """Draw a step whose caches, without pages, hold NaN behind the last token of each kv head."""
    rng = np.random.default_rng(1)
    past = np.array(shape.per_head_past or shape.past, np.int32)
    lengths = past.reshape(len(past), -1) + np.array(shape.tokens)[:, None]
    feeds = {
        "query": rng.standard_normal((sum(shape.tokens), shape.heads, shape.head_size)).astype(shape.dtype),
        "query_start": np.cumsum([0, *shape.tokens]).astype(np.int32),
        "past_len": past,
    }
    for name, rows in zip(
        ("key_cache", "value_cache"), draw_history(shape.kv_heads, shape.head_size).astype(shape.dtype), strict=True
    ):
        feeds[name] = np.stack([np.roll(rows, 5 * b, axis=1) for b in range(len(past))])
        written = np.arange(CAPACITY) < np.broadcast_to(lengths, (len(past), shape.kv_heads))[..., None]
        feeds[name][~written] = np.nan
    return feeds


def in_pages(feeds: Feeds) -> Feeds:
    """Deal the same caches over shuffled pages."""
    sequences, heads, slots, size = feeds["key_cache"].shape
    pages = slots // PAGE_SLOTS
    table = np.random.default_rng(2).permutation(sequences * pages).reshape(sequences, pages).astype(np.int32)
    paged = {**feeds, "block_table": table}
    for name in ("key_cache", "value_cache"):
        paged[name] = np.empty((sequences * pages, heads, PAGE_SLOTS, size), feeds[name].dtype)
        cut = feeds[name].reshape(sequences, heads, pages, PAGE_SLOTS, size)
        paged[name][table] = cut.transpose(0, 2, 1, 3, 4)
    return paged


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    ("head_size", "kv_heads", "group", "options"),
    [
        (64, 2, 8, {}),
        (128, 2, 4, {}),
        (128, 2, 8, {"window": 1100, "sink": 5}),
        (256, 1, 3, {}),
        (512, 1, 4, {}),
        (64, 2, 4, {"per_head": True}),
    ],
)
def test_uneven_packings_over_long_caches(packing, head_size, kv_heads, group, options):
    """Rows of several tokens fill several tiles, those of none fill none, and long ones belong to prefill."""
    tokens = PACKINGS[packing]
    rng = np.random.default_rng(3)
    per_head = rng.integers(0, CAPACITY - 300, (len(tokens), kv_heads)).tolist() if "per_head" in options else None
    shape = Shape(
        tokens=tokens,
        past=rng.integers(0, CAPACITY - 300, len(tokens)).tolist(),
        per_head_past=per_head,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        capacity=CAPACITY,
        window=options.get("window", -1),
        sink=options.get("sink", 0),
    )
    feeds = long_feeds(shape)
    results = run_attention(shape, feeds)
    assert_each_is_as_alone(shape, feeds, results, [b for b, count in enumerate(tokens) if count])
    paged = dataclasses.replace(shape, page_slots=PAGE_SLOTS)
    for actual, expected in zip(run_attention(paged, in_pages(feeds)), results, strict=True):
        devices.assert_same_bits(actual, expected)
    if devices.element() == np.float32:
        return  # the mean of many keys is so small that single roundings decide; other tests hold it to the reference
    for b in (tokens.index(count) for count in (1, 3, 16) if count in tokens):
        one, alone = one_sequence(shape, feeds, b)
        assert_right(one, alone, run_attention(one, alone))


def test_short_chunks_of_many_heads_and_sequences():
    """More of them than the memory for their sums holds apart: a block of the GPU then has all keys of some rows."""
    tokens = [20 + b % 3 for b in range(22)]
    past = [(b * 397 + 1500) % (CAPACITY - 300) for b in range(22)]
    shape = Shape(tokens=tokens, past=past, heads=16, kv_heads=16, head_size=64, capacity=CAPACITY)
    feeds = long_feeds(shape)
    assert_each_is_as_alone(shape, feeds, run_attention(shape, feeds), [0, 1, 9, 20, 21])


@pytest.mark.parametrize("head_size", [64, 128, 256, 512])
def test_a_step_of_as_many_tokens_as_sequences(head_size):
    """CUDA takes it for a token each, but one sequence may have them all."""
    tokens = [70, 2, *[0] * 70]
    past = np.random.default_rng(4).integers(0, CAPACITY - 100, len(tokens)).tolist()
    shape = Shape(tokens=tokens, past=past, heads=4, kv_heads=1, head_size=head_size, capacity=CAPACITY)
    feeds = long_feeds(shape)
    results = run_attention(shape, feeds)
    assert_right(shape, feeds, results)
    assert_each_is_as_alone(shape, feeds, results, [1])


@pytest.mark.parametrize("packing", [*PACKINGS.values(), [40, 1, 64, 5, 0, 17]], ids=[*PACKINGS, "short chunks"])
@pytest.mark.parametrize("options", [{}, {"window": 1100, "sink": 5}], ids=["all keys", "window"])
@pytest.mark.parametrize(("head_size", "group"), [(64, 8), (128, 4), (512, 4)])
def test_a_true_bound_of_tokens_changes_no_bit(head_size, group, options, packing):
    """Bounds by which CUDA leaves out all kernels for chunks, or those for long ones, and one that leaves out none."""
    past = np.random.default_rng(5).integers(0, CAPACITY - 300, len(packing)).tolist()
    shape = Shape(tokens=packing, past=past, heads=group, kv_heads=1, head_size=head_size, capacity=CAPACITY, **options)
    feeds = long_feeds(shape)
    results = run_attention(shape, feeds)
    for bound in {max(packing), 16, 64, sum(packing)}:
        if bound < max(packing):
            continue
        told = {**feeds, "max_query_len": np.array([bound], np.int32)}
        for actual, expected in zip(run_attention(shape, told), results, strict=True):
            devices.assert_same_bits(actual, expected)


@pytest.mark.parametrize(("head_size", "group"), [(64, 3), (96, 1), (128, 2), (256, 1)])
def test_short_chunks_far_into_a_context(head_size, group):
    """Spans of keys that are summed apart grow from 16 K on, on a GPU; on the CPU they are of one length."""
    past = [41000, 16380] if devices.current() == "cuda" else [4100, 1638]
    capacity = max(past) + 100
    shape = Shape(tokens=[33, 20], past=past, heads=group, kv_heads=1, head_size=head_size, capacity=capacity)
    feeds = attention_feeds(shape)
    results = run_attention(shape, feeds)
    assert_right(shape, feeds, results)
    assert_each_is_as_alone(shape, feeds, results, [0, 1])
