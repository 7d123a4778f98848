"""The reference of the fused operators, against the standard operators that they stand for."""

import devices
import numpy as np
import pytest
from fused_cases import (
    LinearCase,
    QkvCase,
    angle_feeds,
    angle_outputs,
    linear_feeds,
    linear_outputs,
    narrow_outputs,
    norm_feeds,
    plain_heads,
    plain_linear,
    plain_norm_add,
    qkv_feeds,
    qkv_outputs,
    run_expanded,
)
from joint_cases import JointCase, joint_feeds, joint_outputs
from tolerances import assert_as_good_as_plain

from ortolan.custom_ops import fused_reference


@pytest.mark.parametrize("activation", ["none", "silu_mul", "gelu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("around", [{}, {"norm": True}, {"norm": True, "bias": True, "residual": True}])
def test_linear(activation, around):
    case = LinearCase(activation=activation, **around)
    feeds = linear_feeds(case, 5, 104, 40)
    (y,) = run_expanded("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes).values()
    assert_as_good_as_plain(y, plain_linear(case, feeds), fused_reference.fused_linear(**feeds, **case.attributes))


@pytest.mark.parametrize("activation", ["silu_mul", "gelu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("around", [{}, {"norm": True, "bias": True}])
def test_linear_with_a_factor(activation, around):
    case = LinearCase(activation=activation, factor=True, **around)
    feeds = linear_feeds(case, 5, 104, 40)
    (y,) = run_expanded("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes).values()
    assert_as_good_as_plain(y, plain_linear(case, feeds), fused_reference.fused_linear(**feeds, **case.attributes))


@pytest.mark.parametrize("follows", [("residual",), ("scale",), ("residual", "scale"), ()])
def test_norm_add(follows):
    rng = np.random.default_rng(0)
    feeds = norm_feeds(rng, 5, 104, np.float32, follows)
    y = run_expanded("RmsNormAdd", feeds, {"y": ((5, 104), np.dtype(np.float32))}, epsilon=1e-6)["y"]
    plain = plain_norm_add(feeds, 1e-6)
    assert_as_good_as_plain(y, plain, fused_reference.rms_norm_add(**feeds, epsilon=1e-6))


def test_gather_rows():
    rows = np.random.default_rng(0).standard_normal((9, 40), np.float32)
    feeds = {"rows": rows, "row_indices": np.array([8, 2, 2], np.int64)}
    output = run_expanded("GatherRows", feeds, {"output": ((3, 40), np.dtype(np.float32))})["output"]
    np.testing.assert_array_equal(output, fused_reference.gather_rows(**feeds))
    np.testing.assert_array_equal(output, rows[[8, 2, 2]])


def test_an_index_outside_the_rows_gives_zeros():
    rows = np.ones((3, 2), np.float32)
    gathered = fused_reference.gather_rows(rows, np.array([-1, 3, 2], np.int64))
    np.testing.assert_array_equal(gathered, [[0, 0], [0, 0], [1, 1]])


NARROWED = {  # query_start, past_len and row_indices; query_start_out and past_len_out
    "last-rows": (([0, 7, 10, 10], [[5, 2], [0, 9], [1, 1]], [4, 5, 6, 9]), ([0, 3, 4, 4], [[9, 6], [2, 11], [1, 1]])),
    "rows-of-nobody": (([0, 1, 2, 2], [7, 8, 0], [0, 1, 0, 0]), ([0, 1, 2, 2], [7, 8, 0])),
}


@pytest.mark.parametrize("positioned", [True, False])
@pytest.mark.parametrize("name", NARROWED)
def test_narrow_step(name, positioned):
    (starts, lengths, rows), expected = NARROWED[name]
    feeds = {"query_start": np.array(starts, np.int32), "past_len": np.array(lengths, np.int32)}
    feeds["row_indices"] = np.array(rows, np.int64)
    if positioned:
        feeds["positions"], expected = 10 * np.arange(10), (*expected, [10 * row for row in rows])
    reference = fused_reference.narrow_step(**feeds)
    standard = run_expanded("NarrowStep", feeds, narrow_outputs(feeds)).values()
    for ours, theirs, wanted in zip(reference, standard, expected, strict=True):
        np.testing.assert_array_equal(ours, wanted)
        np.testing.assert_array_equal(theirs, wanted)


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_rope_angles(factor):
    feeds = angle_feeds(40, 16)
    results = run_expanded("RopeAngles", feeds, angle_outputs(feeds), factor=factor)
    for got, wide in zip(results.values(), fused_reference.rope_angles(**feeds, factor=factor), strict=True):
        assert_as_good_as_plain(got, wide.astype(np.float32), wide)


@pytest.mark.parametrize("norms", [(), ("query", "key"), ("key",)])
@pytest.mark.parametrize("pairs", [0, 5, 8])
@pytest.mark.parametrize("rows", [None, 0, 4])
def test_qkv(norms, pairs, rows):
    options = {"pairs": pairs, "norms": norms, "capture_rows": rows}
    case = QkvCase(tokens=(9, 0, 3), past=(0, 4, 70), sink=2, slots=32, **options)
    feeds = qkv_feeds(case)
    results = run_expanded("QkvRopeAppend", feeds, qkv_outputs(case, feeds), **case.attributes)
    query, keys, values, *captured = fused_reference.qkv_rope_append(**feeds, **case.attributes)
    if rows:
        filled = ~np.isnan(captured[0])
        np.testing.assert_array_equal(np.isnan(results["capture_out"]), ~filled)
        assert_as_good_as_plain(results["capture_out"][filled], captured[0][filled], captured[0][filled])
    assert_as_good_as_plain(results["query"], plain_heads(case, feeds)[0], query)
    written = ~np.isnan(keys)
    np.testing.assert_array_equal(np.isnan(results["key_cache_out"]), ~written)
    assert_as_good_as_plain(results["key_cache_out"][written], keys[written], keys[written])
    np.testing.assert_array_equal(results["value_cache_out"], values)


@pytest.mark.parametrize("rows", [None, 4])
def test_qkv_into_codes(rows):
    case = QkvCase(tokens=(9, 0, 3), past=(0, 4, 70), sink=2, slots=32, capture_rows=rows, code=np.dtype(np.int8))
    feeds = qkv_feeds(case)
    results = run_expanded("QkvRopeAppend", feeds, qkv_outputs(case, feeds), **case.attributes)
    _, _, _, *_, key_scale, value_scale = fused_reference.qkv_rope_append(**feeds, **case.attributes)
    assert_as_good_as_plain(results["key_scale_out"], key_scale, key_scale)
    devices.assert_same_bits(results["value_scale_out"], value_scale)
    assert len(results) == (6 if rows else 5)


@pytest.mark.parametrize("value_is_key", [False, True])
def test_qkv_with_normalised_values(value_is_key):
    case = QkvCase(tokens=(9, 2), past=(0, 4), norms=("key",), value_norm=True, value_is_key=value_is_key)
    feeds = qkv_feeds(case)
    results = run_expanded("QkvRopeAppend", feeds, qkv_outputs(case, feeds), **case.attributes)
    wide = {name: feeds[name].astype(np.float64) for name in ("key_cache", "value_cache")}
    _, _, values = fused_reference.qkv_rope_append(**{**feeds, **wide}, **case.attributes)
    np.testing.assert_array_equal(np.isnan(results["value_cache_out"]), np.isnan(values))
    rows = [cache[0, :, :9].transpose(1, 0, 2) for cache in (results["value_cache_out"], values)]
    assert_as_good_as_plain(rows[0], plain_heads(case, feeds)[2][:9], rows[1])


@pytest.mark.parametrize("code", [None, np.dtype(np.int8)], ids=["dense", "int8"])
@pytest.mark.parametrize("rows", [None, 4])
def test_qkv_attention(code, rows):
    mask = {"window": 12, "scale": 0.05, "softcap": 4.0, "sink_logits": True, "prefix_end": (5, 0, 0)}
    case = JointCase(tokens=(9, 0, 3), past=(0, 4, 70), sink=2, slots=32, capture_rows=rows, code=code, **mask)
    feeds = joint_feeds(case)
    attributes = {**case.attributes, **case.mask}
    results = run_expanded("QkvAttention", feeds, joint_outputs(case, feeds), **attributes)
    expected = fused_reference.qkv_attention(**feeds, **attributes)
    captures = ["capture_out"] if rows else []
    scales = ["key_scale_out", "value_scale_out"] if code else []
    names = ["output", "key_cache_out", "value_cache_out", "query", *captures, *scales]
    assert len(expected) == len(names) == len(results)
    for name, wide in zip(names, expected, strict=True):
        if name.endswith("_cache_out") and code:
            devices.assert_same_bits(results[name], wide)
            continue
        written = ~np.isnan(wide)
        np.testing.assert_array_equal(~np.isnan(results[name]), written)
        assert_as_good_as_plain(results[name][written], wide[written], wide[written])
