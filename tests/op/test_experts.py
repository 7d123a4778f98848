"""MoeExperts against the float64 reference, and what its results may depend on."""

import devices
import numpy as np
import pytest
from expert_cases import ExpertCase, expert_feeds, plain_experts, run_experts
from tolerances import assert_as_good_as_plain

from ortolan.custom_ops import expert_reference

pytestmark = pytest.mark.usefixtures("target")

TOKENS = (1, 2, 5, 16, 17, 40, 150)
CASES = {
    "plain": ExpertCase(),
    "one-of-one": ExpertCase(experts=1, top_k=1),
    "all-experts": ExpertCase(experts=5, top_k=5, residual=True),
    "gelu": ExpertCase(activation="gelu_mul"),
    "gelu-tanh": ExpertCase(activation="gelu_tanh_mul", residual=True),
    "clamped": ExpertCase(activation="clamped_silu_mul", biases=True, residual=True),
    "wide": ExpertCase(hidden=520, inner=264, experts=12, top_k=4, residual=True),
    "odd-sizes": ExpertCase(hidden=50, inner=31, biases=True, residual=True),
}


@pytest.mark.parametrize("name", CASES)
def test_experts_are_as_good_as_plain_arithmetic(name):
    case = CASES[name]
    for tokens in TOKENS:
        feeds = expert_feeds(case, tokens)
        expected = expert_reference.moe_experts(**feeds, **case.attributes)
        assert_as_good_as_plain(run_experts(feeds, **case.attributes), plain_experts(case, feeds), expected)


def test_every_instruction_set_computes_the_same(isa):
    case = CASES["clamped"]
    for tokens in (1, 9):
        feeds = expert_feeds(case, tokens)
        expected = expert_reference.moe_experts(**feeds, **case.attributes)
        assert_as_good_as_plain(run_experts(feeds, **case.attributes), plain_experts(case, feeds), expected)


# On CUDA up to 8 pairs of token and expert belong to one kernel family, more to another.
@pytest.mark.parametrize(("tokens", "first", "count"), [(2, 1, 1), (8, 3, 3), (300, 77, 40), (300, 17, 283)])
@pytest.mark.parametrize("name", ["wide", "odd-sizes"])
def test_a_token_does_not_depend_on_the_others(name, tokens, first, count):
    case = CASES[name]
    feeds = expert_feeds(case, tokens)
    per_token = ("x", "experts", "weights", "residual")
    some = {k: v[first : first + count] if k in per_token else v for k, v in feeds.items()}
    every, few = run_experts(feeds, **case.attributes), run_experts(some, **case.attributes)
    devices.assert_same_bits(few, every[first : first + count])


@pytest.mark.parametrize("tokens", [1, 100])
def test_an_expert_that_no_token_takes_is_not_read(tokens):
    case = CASES["plain"]
    feeds = expert_feeds(case, tokens)
    feeds["experts"] = np.array([[6, 1]] * tokens, np.int32)
    clean = run_experts(feeds)
    others = [e for e in range(case.experts) if e not in (1, 6)]
    for name in ("gate_up", "down"):
        feeds[name][others] = np.nan
    devices.assert_same_bits(run_experts(feeds), clean)


@pytest.mark.parametrize("tokens", [1, 60])
def test_a_token_may_take_an_expert_twice(tokens):
    feeds = expert_feeds(CASES["plain"], tokens)
    feeds["experts"][:] = 3
    expected = expert_reference.moe_experts(**feeds)
    assert_as_good_as_plain(run_experts(feeds), plain_experts(CASES["plain"], feeds), expected)


@pytest.mark.parametrize("tokens", [4, 60])
def test_a_row_of_nan_stays_in_its_row(tokens):
    feeds = expert_feeds(CASES["clamped"], tokens)
    feeds["x"][2] = np.nan
    wrong = np.isnan(run_experts(feeds, **CASES["clamped"].attributes).astype(np.float32))
    assert wrong[2].all()
    assert not np.delete(wrong, 2, axis=0).any()


def test_no_tokens_give_no_rows():
    assert run_experts(expert_feeds(CASES["plain"], 0)).shape == (0, 64)


@pytest.mark.parametrize("tokens", [2, 60])
@pytest.mark.parametrize("expert", [-1, 8, 2**31 - 1])
def test_an_expert_that_does_not_exist_is_refused_or_adds_nothing(tokens, expert):
    case = ExpertCase(residual=True)
    feeds = expert_feeds(case, tokens)
    feeds["experts"][1, 0] = expert
    if devices.current() == "cpu":
        with pytest.raises(Exception, match=rf"holds {expert} for token 1; it must be between 0 and E - 1 = 7"):
            run_experts(feeds)
        return
    expected = expert_reference.moe_experts(**feeds)
    assert_as_good_as_plain(run_experts(feeds), plain_experts(case, feeds), expected)


REFUSED = {
    "gate_up' has shape [8, 95, 64]": {"gate_up": np.zeros((8, 95, 64))},
    "gate_up' has shape [8, 96, 63]": {"gate_up": np.zeros((8, 96, 63))},
    "down' has shape [8, 64, 40]": {"down": np.zeros((8, 64, 40))},
    "weights' has shape [3, 1]": {"weights": np.zeros((3, 1), np.float32)},
    "experts' has shape [2, 2]": {"experts": np.zeros((2, 2), np.int32)},
    "residual' has shape [3, 63]": {"residual": np.zeros((3, 63))},
    "gate_up_bias' has shape [8, 48]": {"gate_up_bias": np.zeros((8, 48))},
    "down_bias' has shape [8, 48]": {"down_bias": np.zeros((8, 48))},
}


@pytest.mark.parametrize("message", REFUSED)
def test_shapes_that_do_not_fit_are_refused(message):
    feeds = expert_feeds(CASES["plain"], 3)
    for name, values in REFUSED[message].items():
        feeds[name] = values if values.dtype in (np.int32, np.float32) else values.astype(devices.element())
    with pytest.raises(Exception, match="test/MoeExperts") as error:
        run_experts(feeds)
    assert message in str(error.value)
