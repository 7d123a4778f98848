"""LowBitLinear on CUDA at the sizes of its streaming kernels: long rows, many outputs, every number of tokens."""

import dataclasses

import devices
import numpy as np
import pytest
from low_bit_cases import LowBitCase, low_bit_feeds, plain_low_bit, run_low_bit
from tolerances import assert_as_good_as_plain

from ortolan.custom_ops import low_bit_reference

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("cuda_target")]

CASES = {
    "int4-128": LowBitCase(group_size=128, inputs=2048, outputs=72, norm=True),
    "int4-128-zero-points": LowBitCase(group_size=128, inputs=1152, outputs=68, zero_points=True, bias=True),
    "int4-128-pairs-of-zero-points": LowBitCase(group_size=128, inputs=1280, outputs=33, zero_points=True),
    "int4-512": LowBitCase(group_size=512, inputs=1536, outputs=30, residual=True),
    "int4-channel-zero-points": LowBitCase(group_size=0, inputs=1376, outputs=41, zero_points=True),
    "int4-gated-long": LowBitCase(group_size=128, inputs=4096, outputs=1100, norm=True, activation="silu_mul"),
    "int4-slices-for-some-warps": LowBitCase(group_size=128, inputs=4352, outputs=48, norm=True, residual=True),
    "int4-64-zero-points": LowBitCase(group_size=64, inputs=640, outputs=36, zero_points=True),
    "int4-32": LowBitCase(group_size=32, inputs=2880, outputs=64, residual=True),
    "int4-channel": LowBitCase(group_size=0, inputs=1120, outputs=40, output="y_float32"),
    "int4-gated": LowBitCase(group_size=128, inputs=1024, outputs=52, norm=True, activation="silu_mul"),
    "int8-32-zero-points": LowBitCase(format="int8", group_size=32, inputs=704, outputs=40, zero_points=True),
    "int8-128": LowBitCase(format="int8", group_size=128, inputs=1024, outputs=500, residual=True),
    "int8-256-zero-points": LowBitCase(format="int8", group_size=256, inputs=768, outputs=29, zero_points=True),
    "int8-channel": LowBitCase(format="int8", group_size=0, inputs=1056, outputs=4300, norm=True),
    "int8-many-outputs": LowBitCase(format="int8", group_size=0, inputs=1024, outputs=24008, norm=True),
    "fp8-channel": LowBitCase(format="fp8", group_size=0, inputs=992, outputs=44, norm=True, bias=True),
    "fp8-blocks": LowBitCase(format="fp8", group_size=128, scale_rows=128, inputs=1024, outputs=300),
    "mxfp4": LowBitCase(format="mxfp4", group_size=32, inputs=2048, outputs=48, activation="gelu_mul"),
    "mxfp4-rows-of-90-scales": LowBitCase(format="mxfp4", group_size=32, inputs=2880, outputs=48, residual=True),
    "nvfp4": LowBitCase(format="nvfp4", group_size=16, inputs=1536, outputs=56, norm=True, residual=True),
    "int4-rows-of-5120-gated": LowBitCase(
        group_size=128, inputs=5120, outputs=1100, norm=True, bias=True, activation="silu_mul"
    ),
    "int4-rows-of-8192-zero-points": LowBitCase(
        group_size=64, inputs=8192, outputs=2200, zero_points=True, norm=True, residual=True
    ),
    "int8-rows-of-6272": LowBitCase(format="int8", group_size=128, inputs=6272, outputs=90, residual=True),
    "fp8-rows-of-14336": LowBitCase(format="fp8", group_size=0, inputs=14336, outputs=70, output="y_float32"),
    "mxfp4-rows-of-4640": LowBitCase(format="mxfp4", group_size=32, inputs=4640, outputs=133, norm=True),
    "nvfp4-rows-of-18432": LowBitCase(format="nvfp4", group_size=16, inputs=18432, outputs=30, activation="gelu_mul"),
    "rows-of-24576": LowBitCase(group_size=128, inputs=24576, outputs=20),
}


def _last_tokens(feeds, tokens):
    return {k: v[len(feeds["x"]) - tokens :] if k in ("x", "residual") else v for k, v in feeds.items()}


@pytest.mark.parametrize("name", CASES)
def test_products_of_every_few_tokens_are_right_and_the_same(name):
    case = CASES[name]
    feeds = low_bit_feeds(case, 16)
    expected = low_bit_reference.low_bit_linear(**feeds, **case.attributes)
    for counts in (range(1, 9), range(9, 17)):  # more than 8 tokens may have another kernel
        last = {tokens: _last_tokens(feeds, tokens) for tokens in counts}
        most = run_low_bit(case, last[counts[-1]])
        plain = plain_low_bit(case, last[counts[-1]])
        assert_as_good_as_plain(most, plain, expected[16 - counts[-1] :])
        for tokens, some in last.items():
            devices.assert_same_bits(run_low_bit(case, some), most[counts[-1] - tokens :])


@pytest.mark.parametrize("name", ["int4-128", "int4-gated", "int8-32-zero-points", "fp8-blocks", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("tokens", [17, 64, 65, 300])
def test_products_of_many_tokens_are_right(name, tokens):
    case = CASES[name]
    feeds = low_bit_feeds(case, tokens)
    expected = low_bit_reference.low_bit_linear(**feeds, **case.attributes)
    assert_as_good_as_plain(run_low_bit(case, feeds), plain_low_bit(case, feeds), expected)


@pytest.mark.parametrize("name", ["int4-128", "int8-128"])
def test_inputs_are_off_by_a_part_of_the_largest_of_256(name):
    """Where large inputs meet weights of 0, nothing hides how the others were rounded."""
    case = dataclasses.replace(CASES[name], norm=False, residual=False, output="y_float32", outputs=64)
    feeds = low_bit_feeds(case, 8)
    feeds["x"][:, ::256] *= 1000
    if case.format == "int4":
        feeds["codes"][:, ::128] = feeds["codes"][:, ::128] & 0xF0 | 8
    else:
        feeds["codes"][:, ::256] = 128
    weight = low_bit_reference.dequantize(codes=feeds["codes"], scales=feeds["scales"], **case.weight_attributes)
    x = feeds["x"].astype(np.float64)
    blocks = np.abs(x).reshape(len(x), -1, 256).max(axis=2) @ np.abs(weight).reshape(len(weight), -1, 256).sum(axis=2).T
    assert (np.abs(run_low_bit(case, feeds) - x @ weight.T) <= blocks * 2.0**-14).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(value):
    case = CASES["int4-128"]
    feeds = low_bit_feeds(case, 9)
    expected = run_low_bit(case, feeds)
    feeds["x"][4, 700] = value
    actual = run_low_bit(case, feeds)
    assert not np.isfinite(actual[4].astype(np.float32)).any()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    devices.assert_same_bits(actual[others], expected[others])


def test_rows_that_no_kernel_streams_are_right():
    case = dataclasses.replace(CASES["int4-128"], group_size=24, inputs=1032, outputs=35, zero_points=True)
    for tokens in (1, 16, 40):
        feeds = low_bit_feeds(case, tokens)
        expected = low_bit_reference.low_bit_linear(**feeds, **case.attributes)
        assert_as_good_as_plain(run_low_bit(case, feeds), plain_low_bit(case, feeds), expected)
