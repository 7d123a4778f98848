"""CausalConv against the float64 reference, and its steps against each other bit for bit."""

import devices
import numpy as np
import pytest
from recurrent_cases import packing, run
from tolerances import assert_as_good_as_plain

from ortolan.custom_ops import recurrent_reference

pytestmark = pytest.mark.usefixtures("target")


def draw(count, features, taps, *, rows=20, ring=0, bias=False, seed=0):
    rng, element = np.random.default_rng(seed), devices.element()
    feeds = {
        "x": rng.standard_normal((count, features)).astype(element),
        "weight": rng.standard_normal((features, taps)).astype(element),
        "conv_state": np.full((rows, ring or taps - 1 + 16, features), np.nan, element),
    }
    return feeds | ({"bias": rng.standard_normal(features).astype(element)} if bias else {})


def step(feeds, lengths, past, activation="silu", **extra):
    feeds = {**feeds, **packing(lengths, past), **extra}
    outputs = {
        name: (feeds[source].shape, feeds[source].dtype)
        for name, source in (("y", "x"), ("conv_state_out", "conv_state"))
    }
    results = run("CausalConv", feeds, outputs, {"conv_state_out": "conv_state"}, activation=activation)
    return results["y"], results["conv_state_out"]


def plain(feeds, lengths, past, activation="silu", **extra):
    """Compute in float32."""
    wide = {name: array.astype(np.float32) for name, array in feeds.items()}
    return recurrent_reference.causal_conv(**wide, **packing(lengths, past), **extra, activation=activation)[0].astype(
        np.float32
    )


def check(feeds, lengths, past, **options):
    y, ring = step(feeds, lengths, past, **options)
    expected, expected_ring = recurrent_reference.causal_conv(**feeds, **packing(lengths, past), **options)
    assert_as_good_as_plain(y, plain(feeds, lengths, past, **options), expected)
    devices.assert_same_bits(ring, expected_ring)
    return feeds | {"conv_state": ring}


@pytest.mark.parametrize("taps", [2, 3, 4, 8])
@pytest.mark.parametrize("features", [1, 7, 64, 65, 136])
@pytest.mark.parametrize("activation", ["silu", "none"])
def test_steps_of_any_length_agree_with_the_reference(taps, features, activation):
    for bias in (False, True):
        feeds, past = draw(80, features, taps, rows=1, bias=bias), 0
        for count in (1, 2, 17, 1, 40, 19):
            after = check(feeds | {"x": feeds["x"][:count]}, [count], [past], activation=activation)
            feeds, past = feeds | {"conv_state": after["conv_state"]}, past + count


def test_a_token_has_the_same_bits_however_steps_are_cut():
    feeds = draw(60, 33, 4, rows=1)
    whole, ring = step(feeds, [60], [0])
    for counts in ([1] * 60, [16, 16, 16, 12], [2, 30, 1, 27]):
        state, first = feeds["conv_state"], 0
        for count in counts:
            part = feeds | {"x": feeds["x"][first : first + count], "conv_state": state}
            y, state = step(part, [count], [first])
            devices.assert_same_bits(y, whole[first : first + count])
            first += count
        devices.assert_same_bits(state, ring)


@pytest.mark.parametrize("drafted", [1, 5, 16])
@pytest.mark.parametrize("before", [1, 2, 30])
def test_a_rewound_step_has_the_bits_of_the_accepted_tokens(before, drafted):
    feeds = draw(before + drafted, 24, 4, rows=1)
    _, ring = step(feeds | {"x": feeds["x"][:before]}, [before], [0])
    _, tried = step(feeds | {"x": feeds["x"][before:], "conv_state": ring}, [drafted], [before])
    following = draw(16, 24, 4, seed=4)["x"]
    for accepted in range(drafted + 1):
        clean = ring
        if accepted:
            kept = {"x": feeds["x"][before : before + accepted], "conv_state": ring}
            _, clean = step(feeds | kept, [accepted], [before])
        results = [
            step(feeds | {"x": following, "conv_state": each}, [16], [before + accepted]) for each in (tried, clean)
        ]
        devices.assert_same_bits(results[0][0], results[1][0])


@pytest.mark.parametrize("count", [1, 4, 16])
def test_a_step_can_be_repeated(count):
    feeds = draw(20 + count, 24, 4, rows=1)
    _, ring = step(feeds | {"x": feeds["x"][:20]}, [20], [0])
    y, after = step(feeds | {"x": feeds["x"][20:], "conv_state": ring}, [count], [20])
    again, after_again = step(feeds | {"x": feeds["x"][20:], "conv_state": after}, [count], [20])
    devices.assert_same_bits(again, y)
    devices.assert_same_bits(after_again, after)


def test_sequences_of_a_batch_do_not_see_each_other():
    slots = np.array([6, 0, 2, 5, 19], np.int32)
    feeds = draw(60, 40, 4)
    feeds = check(feeds, [20, 5, 1, 2, 32], [0] * 5, state_slot=slots)
    check(feeds | {"x": feeds["x"][:58]}, [1, 0, 40, 16, 1], [20, 5, 1, 2, 32], state_slot=slots)
    check(draw(9, 40, 4), [4, 0, 5], [0, 0, 0])


def test_a_ring_of_the_history_alone_is_enough():
    feeds = draw(50, 10, 4, rows=1, ring=3)
    for first, count in ((0, 1), (1, 1), (2, 40), (42, 2), (44, 6)):
        feeds["conv_state"] = check(feeds | {"x": feeds["x"][first : first + count]}, [count], [first])["conv_state"]


def test_no_tokens_change_nothing():
    feeds = draw(0, 8, 4)
    y, ring = step(feeds, [0], [3])
    assert y.shape == (0, 8)
    devices.assert_same_bits(ring, feeds["conv_state"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.zeros((8, 1))}, "with K between 2 and 8"),
        ({"weight": np.zeros((8, 9))}, "with K between 2 and 8"),
        ({"weight": np.zeros((7, 4))}, "input 'weight' has shape"),
        ({"conv_state": np.zeros((1, 2, 8))}, "with Rc >= K - 1 = 3"),
        ({"conv_state": np.zeros((0, 8, 8))}, "with N >= B = 1 where there is no state_slot"),
        ({"bias": np.zeros(9)}, "input 'bias' has shape"),
        ({"activation": "relu"}, "allowed: 'silu' or 'none'"),
    ],
)
def test_what_is_not_allowed_is_refused(change, message):
    change = {
        name: value if isinstance(value, str) else value.astype(devices.element()) for name, value in change.items()
    }
    with pytest.raises(Exception, match="test/CausalConv") as error:
        step(
            draw(1, 8, 4, rows=1) | {k: v for k, v in change.items() if k != "activation"},
            [1],
            [0],
            **{k: v for k, v in change.items() if k == "activation"},
        )
    assert message in str(error.value)
