"""Norms, angles and rows of the fused graph against the float64 reference."""

import re

import devices
import numpy as np
import pytest
from expand_fused import expand_fused
from fused_cases import (
    angle_feeds,
    angle_outputs,
    build_fused_model,
    narrow_outputs,
    norm_feeds,
    plain_norm_add,
    run_fused,
    run_model,
)
from tolerances import assert_as_good_as_plain

from ortolan.custom_ops import fused_reference

pytestmark = pytest.mark.usefixtures("target")


@pytest.mark.parametrize("follows", [("residual",), ("scale",), ("residual", "scale"), ()])
@pytest.mark.parametrize("tokens", [1, 2, 17, 300])
@pytest.mark.parametrize("size", [48, 104, 1151, 1152, 2048, 4096, 5376, 9000])
def test_norm_add_is_as_good_as_plain_operators(tokens, size, follows, isa):
    rng = np.random.default_rng(size)
    feeds = norm_feeds(rng, tokens, size, devices.element(), follows)
    outputs = {"y": ((tokens, size), devices.element())}
    y = run_fused("RmsNormAdd", feeds, outputs, epsilon=1e-6)["y"]
    plain = plain_norm_add(feeds, 1e-6)
    assert_as_good_as_plain(y, plain, fused_reference.rms_norm_add(**feeds, epsilon=1e-6))


@pytest.mark.parametrize("size", [1152, 2048, 4096, 5376])
def test_a_norm_does_not_depend_on_how_many_rows_there_are(size):
    rng, tokens, few = np.random.default_rng(size), 4099, 257
    shapes = {"x": (tokens, size), "norm_weight": (size,), "residual": (tokens, size)}
    feeds = {name: rng.standard_normal(shape).astype(devices.element()) for name, shape in shapes.items()}
    whole = run_fused("RmsNormAdd", feeds, {"y": ((tokens, size), devices.element())}, epsilon=1e-6)["y"]
    for begin in (0, 1000, tokens - few):
        part = feeds | {name: feeds[name][begin : begin + few] for name in ("x", "residual")}
        y = run_fused("RmsNormAdd", part, {"y": ((few, size), devices.element())}, epsilon=1e-6)["y"]
        devices.assert_same_bits(whole[begin : begin + few], y)


ANGLES = [(1, 32), (7, 5), (300, 64), (4099, 128), (0, 32)]  # tokens, pairs


@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize(("tokens", "pairs"), ANGLES)
def test_angles_are_right(tokens, pairs, factor):
    feeds = angle_feeds(tokens, pairs)
    results = run_fused("RopeAngles", feeds, angle_outputs(feeds), factor=factor)
    expected = fused_reference.rope_angles(**feeds, factor=factor)
    for name, wide in zip(results, expected, strict=True):
        assert np.abs(results[name] - wide).max(initial=0) <= 2**-22 * factor


@pytest.mark.cuda
@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize(("tokens", "pairs"), ANGLES)
def test_angles_have_the_bits_of_standard_operators_on_a_gpu(target, tokens, pairs, factor):
    if target.device != "cuda":
        pytest.skip("on the CPU, standard operators compute sines by other polynomials")
    feeds = angle_feeds(tokens, pairs)
    model = build_fused_model("RopeAngles", feeds, angle_outputs(feeds), {"factor": factor})
    results = run_model(model, feeds, angle_outputs(feeds))
    standard = run_model(expand_fused(model), feeds, angle_outputs(feeds))
    for name in results:
        devices.assert_same_bits(results[name], standard[name])


ROWS = {
    "one": (1, [0]),
    "last-of-each": (9, [2, 2, 8]),
    "backwards-and-twice": (5, [4, 0, 3, 0]),
    "every": (300, list(range(300))),
    "more-than-there-are": (3, [2, 1, 0] * 40),
    "outside": (9, [-1, 9, 3, -(2**63), 2**63 - 1, 2**32, 2**32 + 3]),
    "none": (9, []),
    "of-none": (0, [0, -1]),
}


@pytest.mark.parametrize("size", [7, 64, 2048, 5001])
@pytest.mark.parametrize("name", ROWS)
def test_gathered_rows_are_copies(name, size):
    total, indices = ROWS[name]
    rows = np.random.default_rng(0).standard_normal((total, size)).astype(devices.element())
    feeds = {"rows": rows, "row_indices": np.array(indices, np.int64)}
    output = run_fused("GatherRows", feeds, {"output": ((len(indices), size), devices.element())})["output"]
    devices.assert_same_bits(output, fused_reference.gather_rows(**feeds))


@pytest.mark.parametrize(("port", "shape"), [("rows", (3, 4, 2)), ("row_indices", (1, 1))])
def test_gathering_refuses_other_ranks(port, shape):
    feeds = {"rows": np.zeros((3, 4), devices.element()), "row_indices": np.zeros(1, np.int64)}
    feeds[port] = np.zeros(shape, feeds[port].dtype)
    with pytest.raises(Exception, match=f"{port}' has shape") as error:
        run_fused("GatherRows", feeds, {"output": ((1, 4), devices.element())})
    assert "GatherRows" in str(error.value)


def test_angles_refuse_two_rows_of_frequencies():
    feeds = {"positions": np.zeros(3, np.int64), "inv_freq": np.zeros((2, 4), np.float32)}
    with pytest.raises(Exception, match="inv_freq' has shape") as error:
        run_fused("RopeAngles", feeds, dict.fromkeys(("cosine", "sine"), ((1, 3, 4), np.dtype(np.float32))))
    assert "RopeAngles" in str(error.value)


STEPS = {  # query_start, past_len, row_indices, of how many rows
    "decode": ([0, 1], [700], [0], 1),
    "last-of-each": ([0, 7, 10, 10], [5, 0, 3], [6, 9], 10),
    "some-of-each": ([0, 7, 10], [5, 2**30], [4, 5, 6, 8, 9], 10),
    "nothing-of-the-first": ([0, 7, 10], [5, 0], [9], 10),
    "every": ([0, 150, 300], [0, 9], list(range(300)), 300),
    "rows-of-nobody": ([0, 1, 2, 2, 2], [7, 8, 0, 0], [0, 1, 0, 0], 4),
    "per-head": ([0, 3, 4], [[9, 2, 5], [0, 33, 1]], [2, 3], 4),
    "many-heads": ([0, 3], [list(range(300))], [1, 2], 3),
    "no-sequences": ([0], [], [], 0),
    "outside": ([0, 4], [2], [3, -1, 4, 2**40], 4),
}


def narrow_feeds(name, *, positioned=True):
    starts, past, indices, rows = STEPS[name]
    feeds = {"query_start": np.array(starts, np.int32), "past_len": np.array(past, np.int32)}
    feeds["row_indices"] = np.array(indices, np.int64)
    return feeds | ({"positions": 2**33 + 3 * np.arange(rows)} if positioned else {})


@pytest.mark.parametrize("positioned", [True, False])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_narrowed_to_its_last_rows(name, positioned):
    feeds = narrow_feeds(name, positioned=positioned)
    outputs = narrow_outputs(feeds)
    results = run_fused("NarrowStep", feeds, outputs)
    for port, expected in zip(outputs, fused_reference.narrow_step(**feeds), strict=True):
        np.testing.assert_array_equal(results[port], expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"past_len": np.zeros(3, np.int32)}, "past_len' has shape"),
        ({"query_start": np.zeros(0, np.int32)}, "query_start' has shape"),
        ({"positions": None}, "'positions' must be given exactly where"),
    ],
    ids=["lengths", "starts", "positions"],
)
def test_narrowing_refuses(changed, message):
    feeds = narrow_feeds("some-of-each")
    outputs = narrow_outputs(feeds)
    feeds = {name: array for name, array in (feeds | changed).items() if array is not None}
    with pytest.raises(Exception, match=message) as error:
        run_fused("NarrowStep", feeds, outputs)
    assert "NarrowStep" in str(error.value)


@pytest.mark.parametrize(
    ("starts", "positioned", "total"),
    [
        ([-1, 2, 5], True, 5),
        ([-1, 2, 5], False, 5),
        ([0, 7, 5], True, 5),
        ([0, 7, 5], False, 5),
        ([0, 7, 11], True, 10),
        ([0, -2, -1], False, -1),
    ],
)
def test_narrowing_refuses_starts_that_do_not_rise_from_0(starts, positioned, total):
    if devices.current() == "cuda":
        pytest.skip("CUDA does not read the values of lengths on the host")
    feeds = narrow_feeds("some-of-each", positioned=positioned) | {"query_start": np.array(starts, np.int32)}
    message = f"'query_start' must rise from 0 to T = {total}; it holds {starts}"
    with pytest.raises(Exception, match=re.escape(message)):
        run_fused("NarrowStep", feeds, narrow_outputs(feeds))
