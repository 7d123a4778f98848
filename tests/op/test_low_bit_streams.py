"""LowBitLinear on CUDA at the sizes of its streaming kernels: long rows, many outputs, every number of tokens."""

import dataclasses

import devices
import pytest
from low_bit_cases import LowBitCase, low_bit_feeds, plain_low_bit, run_low_bit
from tolerances import assert_as_good_as_plain

from ortolan.custom_ops import low_bit_reference

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("cuda_target")]

CASES = {
    "int4-128": LowBitCase(group_size=128, inputs=2048, outputs=72, norm=True),
    "int4-128-zero-points": LowBitCase(group_size=128, inputs=1152, outputs=68, zero_points=True, bias=True),
    "int4-64-zero-points": LowBitCase(group_size=64, inputs=640, outputs=36, zero_points=True),
    "int4-32": LowBitCase(group_size=32, inputs=2880, outputs=64, residual=True),
    "int4-channel": LowBitCase(group_size=0, inputs=1120, outputs=40, output="y_float32"),
    "int4-gated": LowBitCase(group_size=128, inputs=1024, outputs=52, norm=True, activation="silu_mul"),
    "int8-32-zero-points": LowBitCase(format="int8", group_size=32, inputs=704, outputs=40, zero_points=True),
    "int8-128": LowBitCase(format="int8", group_size=128, inputs=1024, outputs=500, residual=True),
    "int8-channel": LowBitCase(format="int8", group_size=0, inputs=1056, outputs=4300, norm=True),
    "fp8-channel": LowBitCase(format="fp8", group_size=0, inputs=992, outputs=44, norm=True, bias=True),
    "fp8-blocks": LowBitCase(format="fp8", group_size=128, scale_rows=128, inputs=1024, outputs=300),
    "mxfp4": LowBitCase(format="mxfp4", group_size=32, inputs=2048, outputs=48, activation="gelu_mul"),
    "mxfp4-rows-of-90-scales": LowBitCase(format="mxfp4", group_size=32, inputs=2880, outputs=48, residual=True),
    "nvfp4": LowBitCase(format="nvfp4", group_size=16, inputs=1536, outputs=56, norm=True, residual=True),
    "rows-of-24576": LowBitCase(group_size=128, inputs=24576, outputs=20),
}


@pytest.mark.parametrize("name", CASES)
def test_products_of_every_few_tokens_are_right_and_the_same(name):
    case = CASES[name]
    feeds = low_bit_feeds(case, 16)
    expected = low_bit_reference.low_bit_linear(**feeds, **case.attributes)
    all_rows = run_low_bit(case, feeds)
    assert_as_good_as_plain(all_rows, plain_low_bit(case, feeds), expected)
    for tokens in range(1, 16):
        some = {k: v[16 - tokens :] if k in ("x", "residual") else v for k, v in feeds.items()}
        devices.assert_same_bits(run_low_bit(case, some), all_rows[16 - tokens :])


@pytest.mark.parametrize("name", ["int4-128", "int4-gated", "int8-32-zero-points", "fp8-blocks", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("tokens", [17, 64, 65, 300])
def test_products_of_many_tokens_are_right(name, tokens):
    case = CASES[name]
    feeds = low_bit_feeds(case, tokens)
    expected = low_bit_reference.low_bit_linear(**feeds, **case.attributes)
    assert_as_good_as_plain(run_low_bit(case, feeds), plain_low_bit(case, feeds), expected)


def test_rows_that_no_kernel_streams_are_right():
    case = dataclasses.replace(CASES["int4-128"], group_size=24, inputs=1032, outputs=35, zero_points=True)
    for tokens in (1, 16, 40):
        feeds = low_bit_feeds(case, tokens)
        expected = low_bit_reference.low_bit_linear(**feeds, **case.attributes)
        assert_as_good_as_plain(run_low_bit(case, feeds), plain_low_bit(case, feeds), expected)
