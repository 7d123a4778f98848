"""LowBitLinear against the float64 reference, and what its results may depend on."""

import dataclasses

import devices
import numpy as np
import pytest
from low_bit_cases import LowBitCase, low_bit_feeds, plain_low_bit, run_low_bit
from tolerances import assert_as_good_as_plain

from ortolan.custom_ops import low_bit_reference

pytestmark = pytest.mark.usefixtures("target")

TOKENS = (1, 3, 16, 17, 70)
CASES = {
    "int4": LowBitCase(),
    "int4-zero-points": LowBitCase(zero_points=True, inputs=96, residual=True),
    "int4-128": LowBitCase(group_size=128, inputs=384, outputs=24, norm=True),
    "int4-channel": LowBitCase(group_size=0, inputs=100, outputs=33, bias=True),
    "int4-64": LowBitCase(group_size=64, inputs=448, outputs=21, zero_points=True),
    "int4-tail": LowBitCase(inputs=160, outputs=70, activation="silu_mul"),
    "int4-odd-groups": LowBitCase(group_size=48, inputs=144, zero_points=True),
    "int4-256": LowBitCase(group_size=256, inputs=512, outputs=9, zero_points=True),
    "int8": LowBitCase(format="int8", group_size=64, bias=True, residual=True),
    "int8-128": LowBitCase(format="int8", group_size=128, inputs=640, outputs=66, zero_points=True, norm=True),
    "int8-zero-points": LowBitCase(format="int8", zero_points=True, outputs=7),
    "int8-channel": LowBitCase(format="int8", group_size=0, inputs=50, output="y_float32"),
    "fp8-channel": LowBitCase(format="fp8", group_size=0, inputs=72, norm=True),
    "fp8-blocks": LowBitCase(format="fp8", group_size=128, scale_rows=128, inputs=256, outputs=200),
    "fp8-inputs": LowBitCase(format="fp8", input_format="fp8", group_size=0, inputs=72, bias=True),
    "fp8-inputs-norm": LowBitCase(
        format="fp8", input_format="fp8", group_size=0, inputs=320, outputs=65, norm=True, activation="silu_mul"
    ),
    "fp8-inputs-blocks": LowBitCase(
        format="fp8", input_format="fp8", group_size=128, scale_rows=128, inputs=384, outputs=200, residual=True
    ),
    "fp8-inputs-blocks-gated": LowBitCase(
        format="fp8",
        input_format="fp8",
        group_size=128,
        scale_rows=128,
        inputs=256,
        outputs=192,
        norm=True,
        bias=True,
        residual=True,
        activation="gelu_tanh_mul",
    ),
    "fp8-inputs-static": LowBitCase(
        format="fp8", input_format="fp8", input_scale=0.003, group_size=0, inputs=256, outputs=130, output="y_float32"
    ),
    "fp8-inputs-groups": LowBitCase(format="fp8", input_format="fp8", group_size=32, scale_rows=3, outputs=40),
    "mxfp4": LowBitCase(format="mxfp4", group_size=32, outputs=50, bias=True),
    "nvfp4": LowBitCase(format="nvfp4", group_size=16, outputs=31, residual=True),
    "gated": LowBitCase(activation="silu_mul", norm=True, bias=True, outputs=19),
    "gated-fp8": LowBitCase(format="fp8", group_size=0, activation="gelu_tanh_mul", residual=True),
    "gated-erf": LowBitCase(format="nvfp4", group_size=16, activation="gelu_mul", zero_points=False),
}


@pytest.mark.parametrize("name", CASES)
def test_products_are_as_good_as_plain_arithmetic(name):
    case = CASES[name]
    for tokens in TOKENS:
        feeds = low_bit_feeds(case, tokens)
        expected = low_bit_reference.low_bit_linear(**feeds, **case.attributes)
        assert_as_good_as_plain(run_low_bit(case, feeds), plain_low_bit(case, feeds), expected)


@pytest.mark.parametrize("outputs", [264, 131])
@pytest.mark.parametrize(
    "options",
    [
        {"inputs": 1664, "bias": True, "residual": True},
        {"inputs": 640, "activation": "silu_mul", "norm": True},
        {"inputs": 1152, "group_size": 128, "scale_rows": 128, "residual": True},
        {"inputs": 384, "group_size": 128, "scale_rows": 128, "activation": "gelu_mul"},
        {"inputs": 128, "group_size": 128, "scale_rows": 128, "output": "y_float32"},
        {"inputs": 1040, "input_scale": 0.004},
    ],
    ids=str,
)
def test_many_rows_of_codes_are_as_good_as_plain_arithmetic(options, outputs):
    case = LowBitCase(**{"format": "fp8", "input_format": "fp8", "group_size": 0, "outputs": outputs, **options})
    for tokens in (129, 300):
        feeds = low_bit_feeds(case, tokens)
        expected = low_bit_reference.low_bit_linear(**feeds, **case.attributes)
        assert_as_good_as_plain(run_low_bit(case, feeds), plain_low_bit(case, feeds), expected)


INTEGERS = (
    "int4-zero-points",
    "int4-128",
    "int4-64",
    "int4-channel",
    "int8",
    "int8-128",
    "int8-zero-points",
    "int8-channel",
)


@pytest.mark.parametrize("name", [*INTEGERS, "fp8-channel", "nvfp4"])
def test_every_instruction_set_computes_the_same(name, isa):
    case = CASES[name]
    for tokens in (1, 4, 9, 65):
        feeds = low_bit_feeds(case, tokens)
        expected = low_bit_reference.low_bit_linear(**feeds, **case.attributes)
        assert_as_good_as_plain(run_low_bit(case, feeds), plain_low_bit(case, feeds), expected)


@pytest.mark.parametrize(
    "name",
    [
        "int4",
        "int4-64",
        "int4-channel",
        "int8",
        "int8-128",
        "fp8-blocks",
        "fp8-inputs-norm",
        "fp8-inputs-blocks",
        "gated",
    ],
)
def test_a_row_does_not_depend_on_the_others(name):
    case = CASES[name]
    feeds = low_bit_feeds(case, 16)
    for tokens, some in ((8, slice(5, 8)), (16, slice(3, 13))):  # more than 8 tokens may have another kernel
        most, fewer = (
            {k: v[part] if k in ("x", "residual") else v for k, v in feeds.items()} for part in (slice(tokens), some)
        )
        devices.assert_same_bits(run_low_bit(case, fewer), run_low_bit(case, most)[some])


@pytest.mark.parametrize("name", INTEGERS)
def test_on_the_cpu_a_row_does_not_depend_on_how_many_others_there_are(name, isa):
    if devices.current() != "cpu":
        pytest.skip("kernels of a GPU change with the number of rows")
    case = CASES[name]
    feeds = low_bit_feeds(case, 101)
    most = run_low_bit(case, feeds)
    for some in (slice(40, 41), slice(97, 101), slice(49, 54), slice(60)):
        fewer = {k: v[some] if k in ("x", "residual") else v for k, v in feeds.items()}
        devices.assert_same_bits(run_low_bit(case, fewer), most[some])


@pytest.mark.parametrize(
    "name",
    ["int4", "int4-zero-points", "int4-channel", "int8-128", "fp8-blocks", "fp8-inputs"],
)
def test_an_input_that_is_not_finite_shows_in_its_row_alone(name):
    case = CASES[name]
    feeds = low_bit_feeds(case, 6)
    clean = run_low_bit(case, feeds)
    feeds["x"][1, 5], feeds["x"][4, -1] = np.nan, np.inf
    found = run_low_bit(case, feeds)
    assert not np.isfinite(found[[1, 4]]).any()
    devices.assert_same_bits(found[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])


def test_with_a_scale_of_all_inputs_nan_shows_and_infinity_saturates():
    case = CASES["fp8-inputs-static"]
    feeds = low_bit_feeds(case, 4)
    feeds["x"][1, 5], feeds["x"][2, 7] = np.nan, -np.inf
    found = run_low_bit(case, feeds)
    assert np.isnan(found[1]).all()
    feeds["x"][2, 7] = -448 * case.input_scale
    devices.assert_same_bits(found[[0, 2, 3]], run_low_bit(case, feeds)[[0, 2, 3]])


@pytest.mark.parametrize("name", ["int4-128", "int8"])
def test_inputs_of_any_size_keep_their_precision(name):
    case = dataclasses.replace(CASES[name], norm=False, bias=False, residual=False, output="y_float32")
    feeds = low_bit_feeds(case, 5)
    expected = run_low_bit(case, feeds)
    largest = 2.0**-10 if feeds["x"].dtype.itemsize == 2 else 2.0**-60
    scaled = {**feeds, "x": feeds["x"] * feeds["x"].dtype.type(largest)}
    if feeds["x"].dtype == np.float32:  # narrower types lose bits of small values
        devices.assert_same_bits(run_low_bit(case, scaled), expected * np.float32(largest))
    zeros = {**feeds, "x": np.zeros_like(feeds["x"])}
    assert not run_low_bit(case, zeros).any()


def test_no_tokens_give_no_rows():
    case = CASES["gated"]
    assert run_low_bit(case, low_bit_feeds(case, 0)).shape == (0, case.outputs)


@pytest.mark.parametrize(
    ("name", "case", "change", "message"),
    [
        ("codes", CASES["int4"], lambda v: v[:, :-1], "codes' has shape"),
        ("scales", CASES["int4"], lambda v: v[:, :-1], "scales' has shape"),
        ("scales", CASES["int4"], None, "scales' is missing"),
        ("scale_codes", CASES["nvfp4"], None, "scale_codes' is missing"),
        ("float_scales", CASES["nvfp4"], None, "float_scales' is missing"),
        ("zero_points", CASES["int4-zero-points"], lambda v: v[:, :-1], "zero_points' has shape"),
        ("bias", CASES["int8"], lambda v: v[1:], "bias' has shape"),
        ("x", dataclasses.replace(CASES["int4"], group_size=48), None, "group_size = 48 must be 0 or an even divisor"),
        ("x", dataclasses.replace(CASES["mxfp4"], group_size=64), None, "group_size = 64 must be 32"),
        ("x", dataclasses.replace(CASES["int4"], scale_rows=2), None, "scale_rows = 2 must be 1"),
        ("x", dataclasses.replace(CASES["int4"], input_format="fp8"), None, "needs a weight of format 'fp8'"),
        ("x", dataclasses.replace(CASES["int4"], input_scale=1.0), None, "it needs input_format = 'fp8'"),
    ],
)
def test_what_does_not_fit_is_refused(name, case, change, message):
    feeds = low_bit_feeds(dataclasses.replace(case, group_size=32) if name == "x" else case, 2)
    if change is not None:
        feeds[name] = np.ascontiguousarray(change(feeds[name]))
    elif name != "x":
        del feeds[name]
    with pytest.raises(Exception, match="test/LowBitLinear") as error:
        run_low_bit(case, feeds)
    assert message in str(error.value)
