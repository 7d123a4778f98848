"""Operators on caches of int8 and fp8 codes: bits of codes and scales, and attention to what they stand for."""

import dataclasses

import devices
import ml_dtypes
import numpy as np
import pytest
from attention_cases import Shape, attention_feeds, expected_attention, plain_attention, run_attention, run_cached
from harness import random_batch, run_in_place, run_op
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from tolerances import assert_as_good_as_plain

from ortolan.custom_ops import reference
from ortolan.custom_ops.low_bit_cache_reference import dequantise, quantise

CODES = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}

pytestmark = [pytest.mark.usefixtures("target"), pytest.mark.parametrize("code", CODES.values(), ids=CODES)]


def coded(feeds, code):
    """Turn the caches of attention or scoring into codes; empty slots keep NaN scales and codes that mean much."""
    result = dict(feeds)
    for role in ("key", "value"):
        if f"{role}_cache" in feeds:
            rows = feeds[f"{role}_cache"].astype(np.float32)
            empty = np.isnan(rows).any(axis=-1)
            codes, scales = quantise(np.where(empty[..., None], np.float32(1), rows), code)
            result[f"{role}_cache"], result[f"{role}_scale"] = codes, np.where(empty, np.float32(np.nan), scales)
    return result


def decoded(feeds):
    """Return what caches of codes stand for, as float32 caches without scales."""
    result = {name: array for name, array in feeds.items() if not name.endswith("_scale")}
    for role in ("key", "value"):
        if f"{role}_scale" in feeds:
            result[f"{role}_cache"] = dequantise(feeds[f"{role}_cache"], feeds[f"{role}_scale"])
    return result


def rounded(feeds):
    """Return decoded feeds as kernels hold them: those of a GPU in the element type, those of a CPU in float32."""
    stored = devices.element() if devices.current() == "cuda" else np.float32
    return {
        name: array.astype(stored).astype(np.float32) if name in ("key_cache", "value_cache") else array
        for name, array in decoded(feeds).items()
    }


def check_attention(shape, code, seed=0):
    feeds = coded(attention_feeds(shape, seed), code)
    actual = run_attention(shape, feeds)
    plain, expected = plain_attention(shape, rounded(feeds)), expected_attention(shape, feeds)
    for got, rough, exact in zip(actual, plain, expected, strict=True):
        assert_as_good_as_plain(got, rough, exact)
    return actual


def empty_scales(caches):
    return {
        f"{role}_scale": np.full(c.shape[:3], np.nan, np.float32)
        for role, c in zip(("key", "value"), caches, strict=True)
    }


def append_feeds(batch, caches, **extra):
    names = ("key", "value", "query_start", "past_len")
    feeds = {name: getattr(batch, name) for name in names} | {"key_cache": caches[0], "value_cache": caches[1]}
    return feeds | empty_scales(caches) | extra


def codes_of(pages, heads, slots, size, code):
    return [cache.astype(code) for cache in np.zeros((2, pages, heads, slots, size), np.float32)]


@pytest.mark.parametrize("sink", [0, 5])
@pytest.mark.parametrize("tokens", [[1, 1], [30, 7], [33, 0], [100, 64]])
def test_append_writes_codes_and_scales(code, tokens, sink):
    rng = np.random.default_rng(sum(tokens) + sink)
    batch = random_batch(rng, tokens, [3, 61])
    batch.key[0], batch.value[-1] = 0, 0
    batch.key[:, 0] *= 300
    feeds = append_feeds(batch, codes_of(2, 2, 32, 16, code))
    expected = reference.ring_kv_append(**feeds, sink=sink)
    in_place, copied = run_in_place("RingKvAppend", feeds, sink=sink), run_op("RingKvAppend", feeds, sink=sink)
    for got in (list(in_place.values()), copied):
        for actual, wanted in zip(got, expected, strict=True):
            devices.assert_same_bits(actual, wanted)


@pytest.mark.parametrize("size", [8, 24, 80, 128, 256, 512])
def test_every_rounding_of_a_row(code, size):
    """Halves between codes go to the even one, and small values reach the smallest codes."""
    rng = np.random.default_rng(size)
    batch = random_batch(rng, [64], [0], kv_heads=3, head_size=size)
    steps = rng.integers(-254, 255, batch.key.shape) / 2
    steps[..., 0] = 127 if code == np.int8 else 112
    batch.key[...], batch.value[...] = steps, batch.value * 2.0 ** rng.integers(-12, 1, batch.value.shape)
    feeds = append_feeds(batch, codes_of(1, 3, 64, size, code))
    for actual, wanted in zip(run_op("RingKvAppend", feeds), reference.ring_kv_append(**feeds), strict=True):
        devices.assert_same_bits(actual, wanted)


def test_nan_in_a_row_shows_when_it_is_read(code):
    batch = random_batch(np.random.default_rng(0), [2], [0])
    batch.value[1, 0, 3] = np.nan
    caches = run_op("RingKvAppend", append_feeds(batch, codes_of(1, 2, 4, 16, code)))
    assert np.isnan(dequantise(caches[1], caches[3])[0, 0, 1]).all()
    assert np.isfinite(dequantise(caches[1], caches[3])[0, 1, :2]).all()


@pytest.mark.parametrize("page", [16, 32])
def test_paged_equals_contiguous(code, page):
    rng = np.random.default_rng(page)
    batch = random_batch(rng, [40, 9], [70, 3])
    contiguous = run_op("RingKvAppend", append_feeds(batch, codes_of(2, 2, 64, 16, code)), sink=4)
    table = rng.permutation(2 * 64 // page).astype(np.int32).reshape(2, 64 // page)
    pool = codes_of(2 * 64 // page, 2, page, 16, code)
    paged = run_op("RingKvAppend", append_feeds(batch, pool, block_table=table), sink=4)
    for got, want in zip(paged, contiguous, strict=True):
        gathered = np.moveaxis(got[table], 2, 1).reshape(want.shape)
        devices.assert_same_bits(gathered, want)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 19])
@pytest.mark.parametrize(("window", "sink"), [(-1, 0), (8, 0), (8, 3), (64, 4)])
def test_windows_sinks_and_the_wrap(code, window, sink, tokens):
    check_attention(Shape(tokens=(tokens,), past=(100,), window=window, sink=sink), code)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_size", [8, 64, 80, 128, 256, 512])
def test_head_sizes_and_groups(code, head_size, group):
    for tokens in ((1, 1), (5, 3), (70, 1)):
        check_attention(Shape(tokens=tokens, past=(130, 2), heads=2 * group, head_size=head_size), code)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(tokens=(1, 3), per_head_past=((70, 3), (0, 129))),
        Shape(tokens=(33, 1), past=(40, 0), page_slots=16),
        Shape(tokens=(3,), past=(60,), sink_logits=True, options={"softcap": 3.0, "scale": 0.5}),
        Shape(tokens=(40,), past=(0,), prefix_end=(30,)),
        Shape(tokens=(20,), past=(9,), causal=False, window=6),
    ],
    ids=["per-head", "paged", "sink-logits", "prefix", "both-ways"],
)
def test_other_masks_and_layouts(code, shape):
    check_attention(dataclasses.replace(shape, dtype=devices.element()), code)


def test_chunks_and_pages_do_not_change_a_bit(code):
    whole = Shape(tokens=(90,), past=(0,), capacity=128)
    feeds = coded(attention_feeds(whole), code)
    output, lse = run_attention(whole, feeds)
    for begin, end in ((0, 1), (1, 64), (64, 71), (71, 90)):
        part = dataclasses.replace(whole, tokens=(end - begin,), past=(begin,))
        step = feeds | {"query": feeds["query"][begin:end], "past_len": np.array([begin], np.int32)}
        some, some_lse = run_attention(part, step | {"query_start": np.array([0, end - begin], np.int32)})
        if devices.current() == "cpu" or end - begin > 16:
            devices.assert_same_bits(some, output[begin:end])
            devices.assert_same_bits(np.ascontiguousarray(some_lse), np.ascontiguousarray(lse[:, begin:end]))


def rows_alone(shape, feeds, sequence, begin, end):
    """Attend tokens begin .. end of one sequence of a batch, by themselves."""
    first = sum(shape.tokens[:sequence])
    alone = dataclasses.replace(shape, tokens=(end - begin,), past=(shape.past[sequence] + begin,))
    step = {name: array[sequence : sequence + 1] for name, array in feeds.items() if name.endswith(("cache", "scale"))}
    step["query"] = feeds["query"][first + begin : first + end]
    step["query_start"], step["past_len"] = np.array([0, end - begin], np.int32), np.array(alone.past, np.int32)
    return run_attention(alone, feeds | step)


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_few_tokens_have_the_same_bits_one_by_one_and_in_any_batch(code, head_size):
    shape = Shape(tokens=(5, 40, 1), past=(300, 11, 70), head_size=head_size, capacity=384)
    feeds = coded(attention_feeds(shape), code)
    output, lse = run_attention(shape, feeds)
    for sequence, begin, end in ((0, 0, 5), (0, 0, 1), (0, 3, 5), (1, 0, 40), (2, 0, 1)):
        some, some_lse = rows_alone(shape, feeds, sequence, begin, end)
        first = sum(shape.tokens[:sequence])
        devices.assert_same_bits(some, output[first + begin : first + end])
        whole_lse = np.ascontiguousarray(lse[:, first + begin : first + end])
        devices.assert_same_bits(np.ascontiguousarray(some_lse), whole_lse)


@pytest.mark.parametrize("kv_len", [1, 9, 64, 130])
def test_scores_read_codes(code, kv_len):
    rng = np.random.default_rng(kv_len)
    keys = rng.standard_normal((2, 2, kv_len + 3, 64)).astype(devices.element())
    keys[:, :, kv_len:] = np.nan
    lengths = np.array([kv_len, max(1, kv_len - 5)], np.int32)
    capture = rng.standard_normal((2, 8, 8, 64)).astype(devices.element())
    feeds = coded({"capture": capture, "key_cache": keys, "kv_len": lengths}, code)
    (actual,) = run_cached("SnapKvScore", feeds)
    (plain,) = run_cached(
        "SnapKvScore", {k: v.astype(np.float32) if k != "kv_len" else v for k, v in rounded(feeds).items()}
    )
    assert_as_good_as_plain(actual, plain, reference.snapkv_score(**feeds))


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("lists", [1, 2])
def test_compaction_moves_scales_with_their_rows(code, lists, page):
    rng = np.random.default_rng(lists)
    shape = (7, 2, page, 24) if page else (2, 2, 48, 24)
    keys, values = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    feeds = {"key_cache": keys, "value_cache": values}
    feeds = coded(feeds, code)
    keep = np.full((2, lists, 20), -1, np.int32)
    for row in keep.reshape(-1, 20):
        count = rng.integers(1, 21)
        row[:count] = np.sort(rng.choice(48, count, replace=False))
    feeds["keep"] = keep
    if page:
        feeds["block_table"] = rng.permutation(7)[:6].reshape(2, 3).astype(np.int32)
    for got in (run_op("KvCompact", feeds), list(run_in_place("KvCompact", feeds).values())):
        for actual, wanted in zip(got, reference.kv_compact(**feeds), strict=True):
            devices.assert_same_bits(actual, wanted)


def test_scales_that_are_missing_or_of_another_shape_are_refused(code):
    shape = Shape(tokens=(1,), past=(8,))
    feeds = coded(attention_feeds(shape), code)
    with pytest.raises((InvalidArgument, RuntimeError), match=r"'value_scale' is missing"):
        run_op("SwaAttention", {k: v for k, v in feeds.items() if k != "value_scale"}, **shape.attributes)
    with pytest.raises((InvalidArgument, RuntimeError), match=r"'key_scale' has shape .* expected \[N, Hkv, P\]"):
        run_op("SwaAttention", feeds | {"key_scale": feeds["key_scale"][:, :1]}, **shape.attributes)


def test_scales_of_a_dense_cache_are_refused(code):
    shape = Shape(tokens=(1,), past=(8,))
    feeds = attention_feeds(shape)
    scales = {k: v for k, v in coded(feeds, code).items() if k.endswith("_scale")}
    with pytest.raises((InvalidArgument, RuntimeError), match="the cache does not hold codes"):
        run_op("SwaAttention", feeds | scales, **shape.attributes)
