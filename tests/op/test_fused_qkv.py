"""QkvRopeAppend against the float64 reference."""

import dataclasses

import devices
import ml_dtypes
import numpy as np
import pytest
from fused_cases import (
    QkvCase,
    plain_heads,
    qkv_feeds,
    qkv_outputs,
    run_fused,
)
from tolerances import assert_as_good_as_plain

from ortolan.custom_ops import fused_reference, reference

pytestmark = pytest.mark.usefixtures("target")

BOTH = ("query", "key")
NORMED_KEYS = {"value_norm": True, "value_is_key": True}
QKVS = {
    "llama": QkvCase(tokens=(1,), past=(5,), heads=32, kv_heads=8, size=64, pairs=32),
    "qwen3": QkvCase(tokens=(3, 1), past=(5, 0), heads=16, kv_heads=8, size=128, pairs=64, norms=BOTH),
    "gemma3": QkvCase(tokens=(70,), past=(20,), heads=4, kv_heads=1, size=256, pairs=128, norms=BOTH, slots=128),
    "no-rope": QkvCase(tokens=(9, 0, 2), past=(0, 3, 60), pairs=0, slots=128),
    "norm-without-rope": QkvCase(tokens=(9,), past=(3,), pairs=0, norms=BOTH),
    "one-norm": QkvCase(tokens=(4,), past=(3,), norms=("key",)),
    "partial-rotary": QkvCase(tokens=(20,), past=(3,), size=80, pairs=30, norms=BOTH),
    "odd-pairs": QkvCase(tokens=(20,), past=(3,), size=72, pairs=7),
    "ring": QkvCase(tokens=(1, 40, 7), past=(300, 61, 63), slots=64, sink=4),
    "chunk-longer-than-the-ring": QkvCase(tokens=(150, 3), past=(10, 0), slots=64, sink=5, norms=BOTH),
    "paged": QkvCase(tokens=(30, 1), past=(70, 12), slots=112, page_slots=16),
    "paged-ring": QkvCase(tokens=(30, 1), past=(170, 12), slots=60, sink=2, page_slots=16, norms=BOTH),
    "per-head-lengths": QkvCase(tokens=(5, 1), past=((9, 2), (0, 33))),
    "head-512": QkvCase(tokens=(2,), past=(0,), heads=2, kv_heads=1, size=512, pairs=256, norms=BOTH),
    "gemma4": QkvCase(
        tokens=(3, 70), past=(5, 0), heads=8, kv_heads=1, size=256, pairs=128, norms=BOTH, value_norm=True
    ),
    "gemma4-full": QkvCase(tokens=(5,), past=(2,), heads=4, size=512, pairs=256, norms=BOTH, **NORMED_KEYS),
    "normed-keys-as-values": QkvCase(tokens=(20,), past=(3,), size=72, pairs=7, capture_rows=6, **NORMED_KEYS),
    "keys-as-values": QkvCase(tokens=(20, 1), past=(3, 0), value_is_key=True),
    "many-groups": QkvCase(tokens=(6,), past=(0,), heads=16, kv_heads=1, size=64, pairs=32),
    "capture": QkvCase(tokens=(1,), past=(5,), heads=32, kv_heads=8, size=64, pairs=32, capture_rows=64),
    "capture-of-chunks": QkvCase(tokens=(40, 0, 3), past=(0, 5, 9), norms=BOTH, slots=64, capture_rows=8),
    "capture-without-rows": QkvCase(tokens=(9,), past=(3,), capture_rows=0),
    "capture-of-odd-heads": QkvCase(tokens=(20, 1), past=(3, 0), size=72, pairs=7, capture_rows=6),
}


@pytest.mark.parametrize("name", QKVS)
def test_queries_and_keys_are_as_good_as_plain_operators(name, isa):
    case = dataclasses.replace(QKVS[name], tokens=(sum(QKVS[name].tokens),), past=(0,), slots=200, sink=0, page_slots=0)
    feeds = qkv_feeds(case)
    results = run_fused("QkvRopeAppend", feeds, qkv_outputs(case, feeds), **case.attributes)
    wide = {cache: feeds[cache].astype(np.float64) for cache in ("key_cache", "value_cache")}
    query, *caches = fused_reference.qkv_rope_append(**{**feeds, **wide}, **case.attributes)
    plain_query, *plain = plain_heads(case, feeds)
    assert_as_good_as_plain(results["query"], plain_query, query)
    for name, plain_rows, cache in zip(("key", "value"), plain, caches, strict=False):
        expected = cache[0, :, : sum(case.tokens)].transpose(1, 0, 2)
        assert_as_good_as_plain(rows_of(case, results, name), plain_rows, expected)


@pytest.mark.parametrize("name", QKVS)
def test_caches_are_those_of_an_append_of_the_same_keys(name, isa):
    case = QKVS[name]
    feeds = qkv_feeds(case)
    results = run_fused("QkvRopeAppend", feeds, qkv_outputs(case, feeds), **case.attributes)
    aliases = {f"{name}_out": name for name in ("key_cache", "value_cache", "capture") if name in feeds}
    in_place = run_fused("QkvRopeAppend", feeds, qkv_outputs(case, feeds), aliases, **case.attributes)
    whole = {"tokens": (sum(case.tokens),), "past": (0,), "slots": 200, "sink": 0, "page_slots": 0}
    straight = dataclasses.replace(case, **whole, capture_rows=None)
    rows = {**feeds, **{k: v for k, v in qkv_feeds(straight).items() if k in POSITIONED}}
    for name in ("block_table", "capture", "capture_past_len"):
        rows.pop(name, None)
    once = run_fused("QkvRopeAppend", rows, qkv_outputs(straight, rows), **straight.attributes)
    key, value = (rows_of(straight, once, name) for name in ("key", "value"))
    if not case.value_norm:
        first = case.heads + (0 if case.value_is_key else case.kv_heads)
        given = feeds["qkv"].reshape(sum(case.tokens), -1, case.size)[:, first : first + case.kv_heads]
        devices.assert_same_bits(value, given)
    step = {k: feeds[k] for k in (*POSITIONED, "block_table") if k in feeds}
    append = {"sink": case.sink, "capacity": case.slots}
    expected = reference.ring_kv_append(key, value, **step, **append)
    for got in (results, in_place):
        devices.assert_same_bits(got["query"], once["query"])
        if "capture" in feeds:
            rows = (got["query"], feeds["capture"], feeds["query_start"], feeds["capture_past_len"])
            devices.assert_same_bits(got["capture_out"], reference.snapkv_capture(*rows))
        for cache, want in zip(("key_cache_out", "value_cache_out"), expected, strict=True):
            devices.assert_same_bits(got[cache], want)


@pytest.mark.parametrize("code", [np.int8, ml_dtypes.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("name", QKVS)
def test_codes_are_those_of_an_append_of_the_rounded_rows(name, code):
    dense = dataclasses.replace(QKVS[name], capture_rows=None)
    whole = {"tokens": (sum(dense.tokens),), "past": (0,), "slots": 200, "sink": 0, "page_slots": 0}
    straight = dataclasses.replace(dense, **whole)
    case = dataclasses.replace(QKVS[name], code=np.dtype(code))
    feeds = qkv_feeds(case)
    rows = feeds | {k: v for k, v in qkv_feeds(straight).items() if k in POSITIONED}
    dropped = ("block_table", "capture", "capture_past_len", "key_scale", "value_scale")
    rows = {k: v for k, v in rows.items() if k not in dropped}
    once = run_fused("QkvRopeAppend", rows, qkv_outputs(straight, rows), **straight.attributes)
    key, value = (rows_of(straight, once, name) for name in ("key", "value"))
    step = {k: feeds[k] for k in (*POSITIONED, "block_table", "key_scale", "value_scale") if k in feeds}
    expected = reference.ring_kv_append(key, value, **step, sink=case.sink, capacity=case.slots)
    names = ("key_cache", "value_cache", "key_scale", "value_scale")
    for aliases in ({}, {f"{name}_out": name for name in names}):
        results = run_fused("QkvRopeAppend", feeds, qkv_outputs(case, feeds), aliases, **case.attributes)
        devices.assert_same_bits(results["query"], once["query"])
        for cache, want in zip(names, expected, strict=True):
            devices.assert_same_bits(results[f"{cache}_out"], want)


POSITIONED = ("key_cache", "value_cache", "query_start", "past_len")


def rows_of(case, results, name):
    """Return the keys or values [T, Hkv, D] of a step that began an empty cache."""
    return results[f"{name}_cache_out"][0, :, : sum(case.tokens)].transpose(1, 0, 2)


QKV_REFUSALS = {
    "num_heads Hq = 3": (QkvCase(), {"num_heads": 3}, ()),
    "num_heads Hq = 0": (QkvCase(), {"num_heads": 0}, ()),
    "qkv' has shape": (QkvCase(), {"num_heads": 2}, ()),
    "'sine' is missing": (QkvCase(), {}, ("sine",)),
    "'cosine' is missing": (QkvCase(), {}, ("cosine",)),
    "'capture' is missing": (QkvCase(capture_rows=4), {}, ("capture",)),
    "'capture_past_len' is missing": (QkvCase(capture_rows=4), {}, ("capture_past_len",)),
    "2 \\* R at most D = 16": (QkvCase(pairs=9), {}, ()),
    "multiple of 8 up to 512": (QkvCase(size=12, pairs=6), {}, ()),
}


@pytest.mark.parametrize("message", QKV_REFUSALS)
def test_qkv_refuses(message):
    case, attributes, missing = QKV_REFUSALS[message]
    feeds = {k: v for k, v in qkv_feeds(case).items() if k not in missing}
    with pytest.raises(Exception, match=message) as error:
        run_fused("QkvRopeAppend", feeds, qkv_outputs(case, feeds), **{**case.attributes, **attributes})
    assert "QkvRopeAppend" in str(error.value)


QKV_HOST_REFUSALS = {
    "names page 9 for sequence 0": (
        QkvCase(page_slots=16),
        {"block_table": np.full((1, 4), 9, np.int32)},
    ),
    "'capture_past_len' holds -3; a length must be at least 0": (
        QkvCase(capture_rows=4),
        {"capture_past_len": np.array([-3], np.int32)},
    ),
}


@pytest.mark.parametrize("message", QKV_HOST_REFUSALS)
def test_qkv_refuses_values_that_point_outside(message, target):
    if target.device == "cuda":
        pytest.skip("values that lie on a GPU are not checked")
    case, changed = QKV_HOST_REFUSALS[message]
    feeds = qkv_feeds(case) | changed
    with pytest.raises(Exception, match=message) as error:
        run_fused("QkvRopeAppend", feeds, qkv_outputs(case, feeds), **case.attributes)
    assert "test/QkvRopeAppend" in str(error.value)
