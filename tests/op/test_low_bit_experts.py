"""LowBitExperts against the float64 reference, and what its results may depend on."""

import dataclasses

import devices
import numpy as np
import pytest
from expert_cases import ExpertCase
from low_bit_cases import LowBitExpertCase, low_bit_expert_feeds, plain_low_bit_experts, run_low_bit_experts
from tolerances import assert_as_good_as_plain

from ortolan.custom_ops import low_bit_reference

pytestmark = pytest.mark.usefixtures("target")

TOKENS = (1, 2, 5, 16, 17, 40, 150)
GPT_OSS = ExpertCase(hidden=96, inner=160, activation="clamped_silu_mul", biases=True, residual=True)
WIDE = ExpertCase(hidden=512, inner=384, experts=12, top_k=4, residual=True)
LONG = ExpertCase(hidden=1120, inner=96, experts=4, top_k=1, activation="clamped_silu_mul", biases=True)
CASES = {
    "int4": LowBitExpertCase(),
    "int4-zero-points": LowBitExpertCase(experts=GPT_OSS, zero_points=True),
    "int4-128": LowBitExpertCase(experts=WIDE, group_size=128),
    "int4-channel": LowBitExpertCase(experts=ExpertCase(hidden=50, inner=34, biases=True), group_size=0),
    "int8": LowBitExpertCase(experts=WIDE, format="int8", group_size=64),
    "int8-zero-points": LowBitExpertCase(format="int8", zero_points=True),
    "int8-channel": LowBitExpertCase(experts=ExpertCase(hidden=50, inner=31), format="int8", group_size=0),
    "fp8-channel": LowBitExpertCase(experts=GPT_OSS, format="fp8", group_size=0),
    "fp8-blocks": LowBitExpertCase(experts=WIDE, format="fp8", group_size=128, scale_rows=128),
    "fp8-part-of-a-block": LowBitExpertCase(format="fp8", group_size=64, scale_rows=48),
    "mxfp4": LowBitExpertCase(experts=GPT_OSS, format="mxfp4", group_size=32),
    "mxfp4-wide": LowBitExpertCase(experts=WIDE, format="mxfp4", group_size=32),
    "mxfp4-long": LowBitExpertCase(experts=LONG, format="mxfp4", group_size=32),
    "int4-long": LowBitExpertCase(experts=LONG, group_size=32),
    "int4-256": LowBitExpertCase(
        experts=ExpertCase(hidden=512, inner=256, experts=4), group_size=256, zero_points=True
    ),
    "nvfp4": LowBitExpertCase(experts=GPT_OSS, format="nvfp4", group_size=16),
    "gelu": LowBitExpertCase(experts=ExpertCase(hidden=64, inner=32, activation="gelu_tanh_mul")),
    "one-of-one": LowBitExpertCase(experts=ExpertCase(hidden=64, inner=32, experts=1, top_k=1)),
}


def assert_right(case: LowBitExpertCase, tokens: int) -> None:
    feeds = low_bit_expert_feeds(case, tokens)
    expected = low_bit_reference.low_bit_experts(**feeds, **case.attributes)
    assert_as_good_as_plain(run_low_bit_experts(case, feeds), plain_low_bit_experts(case, feeds), expected)


@pytest.mark.parametrize("name", CASES)
def test_experts_are_as_good_as_plain_arithmetic(name):
    for tokens in TOKENS:
        assert_right(CASES[name], tokens)


@pytest.mark.parametrize("name", ["int4-zero-points", "int8", "fp8-channel", "mxfp4", "nvfp4"])
def test_every_instruction_set_computes_the_same(name, isa):
    for tokens in (1, 9):
        assert_right(CASES[name], tokens)


# On CUDA up to 3 pairs of token and expert for two experts belong to one kernel family, up to 32 for each to another,
# more to a third.
@pytest.mark.parametrize(("tokens", "first", "count"), [(4, 1, 2), (4, 0, 3), (40, 7, 30), (300, 17, 283)])
@pytest.mark.parametrize("name", ["int4-128", "int4-channel", "int8", "mxfp4", "mxfp4-long", "fp8-blocks"])
def test_a_token_does_not_depend_on_the_others(name, tokens, first, count):
    case = CASES[name]
    feeds = low_bit_expert_feeds(case, tokens)
    per_token = ("x", "experts", "weights", "residual")
    some = {k: v[first : first + count] if k in per_token else v for k, v in feeds.items()}
    devices.assert_same_bits(run_low_bit_experts(case, some), run_low_bit_experts(case, feeds)[first : first + count])


@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize("name", ["int4", "fp8-part-of-a-block"])
def test_an_expert_that_no_token_takes_is_not_read(name, tokens):
    case = CASES[name]
    feeds = low_bit_expert_feeds(case, tokens)
    feeds["experts"] = np.array([[6, 1]] * tokens, np.int32)
    clean = run_low_bit_experts(case, feeds)
    others = [e for e in range(case.experts.experts) if e not in (1, 6)]
    for port in ("gate_up_scales", "down_scales", "gate_up_float_scales", "down_float_scales"):
        if port in feeds:
            feeds[port][others] = np.nan
    devices.assert_same_bits(run_low_bit_experts(case, feeds), clean)


@pytest.mark.parametrize("tokens", [1, 60])
def test_a_token_may_take_an_expert_twice(tokens):
    case = CASES["int4"]
    feeds = low_bit_expert_feeds(case, tokens)
    feeds["experts"][:] = 3
    expected = low_bit_reference.low_bit_experts(**feeds, **case.attributes)
    assert_as_good_as_plain(run_low_bit_experts(case, feeds), plain_low_bit_experts(case, feeds), expected)


@pytest.mark.parametrize("tokens", [4, 60])
def test_a_row_of_nan_stays_in_its_row(tokens):
    feeds = low_bit_expert_feeds(CASES["mxfp4"], tokens)
    feeds["x"][2] = np.nan
    wrong = np.isnan(run_low_bit_experts(CASES["mxfp4"], feeds).astype(np.float32))
    assert wrong[2].all()
    assert not np.delete(wrong, 2, axis=0).any()


def test_the_smallest_and_the_largest_exponents_of_mxfp4_are_read():
    case = CASES["mxfp4"]
    feeds = low_bit_expert_feeds(case, 2)
    feeds["gate_up_scale_codes"][..., ::2] = 0
    feeds["down_scale_codes"][..., 1::2] = 0
    feeds["down_scale_codes"][:, ::16] = 137
    expected = low_bit_reference.low_bit_experts(**feeds, **case.attributes)
    assert_as_good_as_plain(run_low_bit_experts(case, feeds), plain_low_bit_experts(case, feeds), expected)


def test_no_tokens_give_no_rows():
    assert run_low_bit_experts(CASES["int4"], low_bit_expert_feeds(CASES["int4"], 0)).shape == (0, 128)


@pytest.mark.parametrize("tokens", [2, 60])
@pytest.mark.parametrize("expert", [-1, 8, 2**31 - 1])
def test_an_expert_that_does_not_exist_is_refused_or_adds_nothing(tokens, expert):
    case = CASES["mxfp4"]
    feeds = low_bit_expert_feeds(case, tokens)
    feeds["experts"][1, 0] = expert
    if devices.current() == "cpu":
        with pytest.raises(Exception, match=rf"holds {expert} for token 1; it must be between 0 and E - 1 = 7"):
            run_low_bit_experts(case, feeds)
        return
    expected = low_bit_reference.low_bit_experts(**feeds, **case.attributes)
    assert_as_good_as_plain(run_low_bit_experts(case, feeds), plain_low_bit_experts(case, feeds), expected)


@pytest.mark.parametrize(
    ("name", "case", "change", "message"),
    [
        ("gate_up_codes", CASES["int4"], lambda v: v[:, :, :-1], "gate_up_codes' has shape"),
        ("gate_up_codes", CASES["int4"], lambda v: v[:, :-1], "gate_up_codes' has shape"),
        ("down_codes", CASES["int4"], lambda v: v[:, :-1], "down_codes' has shape"),
        ("down_codes", CASES["int4"], lambda v: v[1:], "down_codes' has shape"),
        ("down_scales", CASES["int4"], lambda v: v[:, :, :-1], "down_scales' has shape"),
        ("gate_up_scales", CASES["int4"], None, "gate_up_scales' is missing"),
        ("down_scale_codes", CASES["mxfp4"], None, "down_scale_codes' is missing"),
        ("down_float_scales", CASES["nvfp4"], None, "down_float_scales' is missing"),
        ("gate_up_zero_points", CASES["int4-zero-points"], lambda v: v[:, :, :-1], "gate_up_zero_points' has shape"),
        ("gate_up_bias", CASES["mxfp4"], lambda v: v[:, 1:], "gate_up_bias' has shape"),
        ("x", dataclasses.replace(CASES["int4"], group_size=48), None, "48 must be 0 or an even divisor of H = 128"),
        ("x", dataclasses.replace(CASES["int4"], group_size=128), None, "128 must be 0 or an even divisor of I = 64"),
        ("x", dataclasses.replace(CASES["mxfp4"], group_size=64), None, "group_size = 64 must be 32"),
    ],
)
def test_what_does_not_fit_is_refused(name, case, change, message):
    right = dataclasses.replace(case, group_size=32) if name == "x" else case
    feeds = low_bit_expert_feeds(right, 2)
    if message.endswith("I = 64"):  # what comes before is right
        feeds["gate_up_scales"] = feeds["gate_up_scales"][:, :, :1]
    if change is not None:
        feeds[name] = np.ascontiguousarray(change(feeds[name]))
    elif name != "x":
        del feeds[name]
    with pytest.raises(Exception, match="test/LowBitExperts") as error:
        run_low_bit_experts(case, feeds)
    assert message in str(error.value)
