"""FusedLinear with batch_invariant = 1: a row has the same bits whatever rows stand beside it, and is right."""

import devices
import numpy as np
import pytest
from fused_cases import LinearCase, linear_feeds, linear_outputs, plain_linear, run_fused
from tolerances import assert_as_good_as_plain

from ortolan.custom_ops import fused_reference

CASES = [
    LinearCase(),
    LinearCase(norm=True, bias=True, residual=True),
    LinearCase(float32=True, norm=True),
    LinearCase(activation="silu_mul", norm=True),
    LinearCase(activation="gelu_mul", bias=True),
    LinearCase(activation="gelu_tanh_mul", norm=True, residual=True),
    LinearCase(activation="gelu_tanh_mul", norm=True, bias=True, factor=True),
    LinearCase(activation="silu_mul", factor=True, float32=True),
]
SIZES = [(50, 37), (104, 40), (1152, 131), (2176, 72)]
ROWS = 300
# First row and number of rows: of a few, and of more than any kernel for a few takes.
PLACES = [(0, 1), (17, 1), (ROWS - 1, 1), (4, 2), (9, 7), (3, 8), (20, 16), (1, 17), (40, 64), (7, 100), (2, 257)]


def multiply(case, feeds):
    (y,) = run_fused("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes, batch_invariant=1).values()
    return y


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_does_not_depend_on_the_others(isa, case, size):
    feeds = linear_feeds(case, ROWS, *size)
    every = multiply(case, feeds)
    assert_as_good_as_plain(every, plain_linear(case, feeds), fused_reference.fused_linear(**feeds, **case.attributes))
    for first, count in PLACES:
        rows = {name: feeds[name][first : first + count] for name in ("x", "residual", "factor") if name in feeds}
        devices.assert_same_bits(multiply(case, feeds | rows), every[first : first + count])


def test_a_row_does_not_depend_on_its_place(target):
    case = LinearCase(norm=True)
    feeds = linear_feeds(case, ROWS, 1152, 131)
    turned = feeds | {"x": np.ascontiguousarray(feeds["x"][::-1])}
    devices.assert_same_bits(multiply(case, turned)[::-1], multiply(case, feeds))


def test_no_rows_give_no_rows(target):
    case = LinearCase(norm=True)
    feeds = linear_feeds(case, 1, 104, 40)
    assert multiply(case, feeds | {"x": feeds["x"][:0]}).shape == (0, 40)
