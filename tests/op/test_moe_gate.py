"""MoeGate against the float64 reference: the same experts, and weights as good as float32's."""

import devices
import numpy as np
import pytest
from expert_cases import run_gate
from tolerances import assert_as_good_as_plain

from ortolan.custom_ops import expert_reference

pytestmark = pytest.mark.usefixtures("target")


def draw_logits(tokens, experts, seed=0):
    """Draw logits that differ from each other by more than rounding, in every element type."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(experts) for _ in range(tokens)]
    return ((np.array(rows).reshape(tokens, experts) - experts / 2) / 16).astype(devices.element())


def plain_weights(feeds, experts, *, top_k, scoring="softmax", normalise=0, scale=1.0):
    """Compute the weights of chosen experts in float32."""
    logits = feeds["router_logits"].astype(np.float32)
    if scoring == "softmax":
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits))
    weights = np.take_along_axis(scores, experts, axis=1)
    if normalise:
        weights = weights / weights.sum(axis=1, keepdims=True)
    weights = weights * np.float32(scale)
    return weights * feeds["expert_scale"][experts] if "expert_scale" in feeds else weights


def check(feeds, **attributes):
    experts, weights = run_gate(feeds, **attributes)
    expected_experts, expected = expert_reference.moe_gate(**feeds, **attributes)
    np.testing.assert_array_equal(experts, expected_experts)
    assert_as_good_as_plain(weights, plain_weights(feeds, experts, **attributes), expected)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [0, 1])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 2), (7, 7), (60, 4), (128, 8), (200, 6), (512, 10), (300, 40)])
def test_chosen_experts_and_weights(scoring, normalise, experts, top_k):
    for tokens in (1, 2, 33, 100):
        feeds = {"router_logits": draw_logits(tokens, experts)}
        check(feeds, top_k=top_k, scoring=scoring, normalise=normalise, scale=2.5)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_bias_chooses_and_does_not_weigh(scoring):
    bias = np.linspace(-1, 1, 16, dtype=np.float32)[np.random.default_rng(1).permutation(16)]
    feeds = {"router_logits": draw_logits(20, 16), "selection_bias": bias}
    check(feeds, top_k=4, scoring=scoring, normalise=1)
    check(feeds, top_k=4, scoring=scoring)


def test_each_expert_has_a_scale():
    scale = np.random.default_rng(1).standard_normal(16).astype(np.float32)
    check({"router_logits": draw_logits(20, 16), "expert_scale": scale}, top_k=4, normalise=1)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_of_equals_the_lower_expert_comes_first(scoring):
    logits = np.zeros((3, 40), devices.element())
    logits[1, [39, 7, 20]] = 1
    logits[2, ::2] = -0.0
    experts, _ = run_gate({"router_logits": logits}, top_k=5, scoring=scoring)
    np.testing.assert_array_equal(experts, [[0, 1, 2, 3, 4], [7, 20, 39, 0, 1], [0, 1, 2, 3, 4]])


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_logits_give_finite_weights(size):
    logits = np.full((1, 8), size, devices.element())
    logits[0, 3] += 64 if size < 1e4 else 0
    check({"router_logits": logits}, top_k=3, normalise=1)


def test_weights_are_zero_where_all_scores_are():
    feeds = {"router_logits": np.full((1, 8), -2e4, devices.element())}
    _, weights = run_gate(feeds, top_k=3, scoring="sigmoid", normalise=1)
    np.testing.assert_array_equal(weights, np.zeros((1, 3)))


@pytest.mark.parametrize("normalise", [0, 1])
@pytest.mark.parametrize("broken", [[5], list(range(12))])
def test_a_row_of_nan_chooses_experts_that_exist(broken, normalise):
    logits = draw_logits(3, 12)
    clean = run_gate({"router_logits": logits}, top_k=4, normalise=normalise)
    logits[1, broken] = np.nan
    experts, weights = run_gate({"router_logits": logits}, top_k=4, normalise=normalise)
    assert len(set(experts[1])) == 4
    assert set(experts[1]) <= set(range(12))
    assert np.isnan(weights[1]).all()
    for after, before in zip((experts, weights), clean, strict=True):
        np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])


def test_no_tokens_give_no_rows():
    assert run_gate({"router_logits": draw_logits(0, 8)}, top_k=2)[0].shape == (0, 2)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"top_k": 9}, "top_k K = 9 must be at most E = 8"),
        ({"top_k": 0}, "top_k K = 0"),
        ({"top_k": 2, "normalise": 2}, "normalise = 2"),
        ({"top_k": 2, "scoring": "relu"}, "allowed: 'softmax' or 'sigmoid'"),
    ],
)
def test_what_is_not_allowed_is_refused(attributes, message):
    with pytest.raises(Exception, match="test/MoeGate") as error:
        run_gate({"router_logits": draw_logits(2, 8)}, **attributes)
    assert message in str(error.value)


def test_inputs_of_other_sizes_are_refused():
    feeds = {"router_logits": draw_logits(2, 8), "selection_bias": np.zeros(7, np.float32)}
    with pytest.raises(Exception, match="selection_bias' has shape"):
        run_gate(feeds, top_k=2)
