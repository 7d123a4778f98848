"""GatedDeltaRule against the float64 reference, and its steps against each other bit for bit."""

import devices
import numpy as np
import pytest
from recurrent_cases import (
    RECENT,
    STATES,
    DeltaCase,
    delta_step,
    delta_tokens,
    expected_delta,
    fresh_states,
    plain_delta,
    rows_of,
)
from tolerances import CHUNKED_DELTA_RELATIVE, DELTA_STEPS, assert_as_good_as_plain, largest_error

pytestmark = pytest.mark.usefixtures("target")

SMALL = DeltaCase()
SIZES = {
    "small": SMALL,
    "odd": DeltaCase(key_heads=1, value_heads=3, key_size=13, value_size=37),
    "one-head": DeltaCase(key_heads=1, value_heads=1, key_size=8, value_size=8),
    "published": DeltaCase(key_heads=2, value_heads=4, key_size=128, value_size=128),
    "halves": DeltaCase(key_heads=2, value_heads=2, key_size=96, value_size=192),
    "wide": DeltaCase(key_heads=1, value_heads=2, key_size=256, value_size=256),
    "plain-rows": DeltaCase(key_size=32, value_size=32, l2_norm=0, scale=0.7),
}


def rounds_by_chunks(case, count):
    return devices.current() == "cuda" and devices.element() != np.float32 and count > RECENT


def assert_close(actual, plain, expected, *, chunked):
    """A chunk's products have 16-bit factors; what the recurrent form computes is as good as plain float32."""
    if not chunked:
        return assert_as_good_as_plain(actual, plain, expected)
    limit = CHUNKED_DELTA_RELATIVE[devices.element().name] * np.abs(expected).max()
    assert largest_error(actual, expected) <= limit
    return None


def same(actual, expected, names=STATES):
    for name in names:
        devices.assert_same_bits(actual[name], expected[name])


def read(case, tokens, steps, states=None, past=0):
    """Read the tokens of one sequence in steps of so many; returns outputs and states."""
    states = states or fresh_states(case)
    outputs, first = [], 0
    for count in steps:
        output, states = delta_step(case, rows_of(tokens, first, first + count), states, [count], [past + first])
        outputs.append(output)
        first += count
    return np.concatenate(outputs), states


@pytest.mark.parametrize("case", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("count", [1, 2, 5, 16, 17, 63, 64, 65, 130])
def test_a_fresh_sequence_agrees_with_the_reference(case, count):
    tokens, states = delta_tokens(case, count), fresh_states(case)
    output, after = delta_step(case, tokens, states, [count], [0])
    expected, expected_after = expected_delta(case, tokens, states, [count], [0])
    plain, plain_state = plain_delta(case, tokens)
    chunked = rounds_by_chunks(case, count)
    assert_close(output, plain, expected, chunked=chunked)
    assert (
        after["state_len"].tolist()
        == expected_after.state_len.tolist()
        == [0 if count <= RECENT else count, 1000, 1000]
    )
    if count > RECENT:
        assert_close(after["state"][0], plain_state, expected_after.state[0], chunked=chunked)
    else:
        assert not after["state"][0].any()
    same({n: after[n][1:] for n in STATES}, {n: states[n][1:] for n in STATES})


@pytest.mark.parametrize("steps", [[1] * 40, [3, 1, 16, 2, 16, 2], [7] * 5 + [5], [20, 4, 16], [40], [17, 1, 22]])
def test_later_steps_continue(steps):
    tokens = delta_tokens(SMALL, 40)
    output, _ = read(SMALL, tokens, steps)
    expected, _ = expected_delta(SMALL, tokens, fresh_states(SMALL), [40], [0])
    assert_close(
        output, plain_delta(SMALL, tokens)[0], expected, chunked=any(rounds_by_chunks(SMALL, s) for s in steps)
    )


@pytest.mark.parametrize("case", [SMALL, SIZES["odd"], SIZES["published"]])
def test_few_tokens_have_the_bits_of_one_by_one(case):
    tokens = delta_tokens(case, 48)
    alone, alone_states = read(case, tokens, [1] * 48)
    for steps in ([16, 16, 16], [5, 11, 1, 14, 16, 1], [2] * 24):
        output, states = read(case, tokens, steps)
        devices.assert_same_bits(output, alone)
        next_token = delta_tokens(case, 1, seed=9)
        after = [delta_step(case, next_token, each, [1], [48]) for each in (states, alone_states)]
        devices.assert_same_bits(after[0][0], after[1][0])
        same(after[0][1], after[1][1], ("state", "state_len"))


@pytest.mark.parametrize("before", [0, 1, 14, 20])
@pytest.mark.parametrize("drafted", [1, 2, 15, 16])
def test_a_rewound_step_has_the_bits_of_the_accepted_tokens(before, drafted):
    tokens = delta_tokens(SMALL, before + drafted)
    following = delta_tokens(SMALL, 16, seed=5)
    start = fresh_states(SMALL)
    if before:
        _, start = delta_step(SMALL, rows_of(tokens, 0, before), start, [before], [0])
    draft = rows_of(tokens, before, before + drafted)
    _, tried = delta_step(SMALL, draft, start, [drafted], [before])
    for accepted in range(drafted + 1):
        clean = start
        if accepted:
            _, clean = delta_step(SMALL, rows_of(draft, 0, accepted), start, [accepted], [before])
        for count in (1, 16):
            step = [SMALL, rows_of(following, 0, count)]
            output, after = delta_step(*step, tried, [count], [before + accepted])
            expected, expected_after = delta_step(*step, clean, [count], [before + accepted])
            devices.assert_same_bits(output, expected)
            if count == RECENT:  # a step of so many makes all room; a shorter one no more than it needs
                same(after, expected_after)


@pytest.mark.parametrize("past", [0, 1, 7, 30])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_step_can_be_repeated(past, count):
    start = fresh_states(SMALL)
    if past:
        _, start = read(SMALL, delta_tokens(SMALL, past), [past])
    tokens = delta_tokens(SMALL, count, seed=1)
    output, states = delta_step(SMALL, tokens, start, [count], [past])
    for _ in range(2):
        again, states_again = delta_step(SMALL, tokens, states, [count], [past])
        devices.assert_same_bits(again, output)
        same(states_again, states)


def test_sequences_of_a_batch_do_not_see_each_other():
    case = DeltaCase(rows=7)
    lengths, past = [1, 0, 40, 16, 17], [20, 3, 0, 5, 2]
    histories = [delta_tokens(case, max(p, 1), seed=i) for i, p in enumerate(past)]
    slots = np.array([6, 0, 2, 5, 3], np.int32)
    states = fresh_states(case)
    for history, length, slot in zip(histories, past, slots, strict=True):
        if length:
            step = (case, rows_of(history, 0, length), states, [length], [0])
            _, states = delta_step(*step, state_slot=np.array([slot], np.int32))
    tokens = delta_tokens(case, sum(lengths), seed=50)
    output, after = delta_step(case, tokens, states, lengths, past, state_slot=slots)
    first = 0
    for length, position, slot in zip(lengths, past, slots, strict=True):
        own = rows_of(tokens, first, first + length)
        if length:
            step = (case, own, states, [length], [position])
            alone, alone_states = delta_step(*step, state_slot=np.array([slot], np.int32))
            devices.assert_same_bits(output[first : first + length], alone)
        else:
            alone_states = states
        same(
            {n: after[n][slot] for n in STATES if n != "state_len"},
            {n: alone_states[n][slot] for n in STATES},
            STATES[:4],
        )
        assert after["state_len"][slot] == alone_states["state_len"][slot]
        first += length
    for row in (1, 4):
        same({n: after[n][row] for n in STATES[:4]}, {n: states[n][row] for n in STATES}, STATES[:4])


def test_many_sequences_decode_together():
    case = DeltaCase(rows=70)
    past = [3] * 70
    states = fresh_states(case)
    _, states = delta_step(case, delta_tokens(case, 210), states, past, [0] * 70)
    tokens = delta_tokens(case, 70, seed=3)
    output, after = delta_step(case, tokens, states, [1] * 70, past)
    expected, _ = expected_delta(case, tokens, states, [1] * 70, past)
    np.testing.assert_allclose(output.astype(np.float64), expected, atol=DELTA_STEPS[output.itemsize])
    assert after["state_len"].tolist() == [0] * 70


@pytest.mark.parametrize("back", [1, 2, 3, 14, 15])
def test_a_sequence_goes_back_behind_several_steps(back):
    tokens = delta_tokens(SMALL, 40)
    _, ahead = read(SMALL, tokens, [1] * 40)
    _, clean = read(SMALL, tokens, [1] * (40 - back))
    assert ahead["state_len"][0] == 40 - RECENT
    following = delta_tokens(SMALL, RECENT, seed=7)
    steps = [delta_step(SMALL, following, states, [RECENT], [40 - back]) for states in (ahead, clean)]
    devices.assert_same_bits(steps[0][0], steps[1][0])
    same(steps[0][1], steps[1][1])


@pytest.mark.parametrize("count", [3, 100])
def test_decays_and_betas_at_their_ends(count):
    tokens = delta_tokens(SMALL, count)
    tokens["decay"][::3] = 0
    tokens["decay"][1::3] = -200
    tokens["beta"][::2] = 1
    tokens["beta"][1::2] = 0
    tokens["key"][0] = 0
    output, _ = read(SMALL, tokens, [count])
    expected, _ = expected_delta(SMALL, tokens, fresh_states(SMALL), [count], [0])
    assert_close(output, plain_delta(SMALL, tokens)[0], expected, chunked=rounds_by_chunks(SMALL, count))


def test_no_tokens_change_nothing():
    states = fresh_states(SMALL)
    output, after = delta_step(SMALL, delta_tokens(SMALL, 0), states, [0, 0], [5, 0])
    assert output.shape == (0, 4, 24)
    same(after, states)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"past_len": np.array([25], np.int32)}, "only R = 16 updates are kept; past_len must be at most 20"),
        ({"past_len": np.array([3], np.int32)}, "has read 4 tokens, and cannot forget"),
        ({"past_len": np.array([-1], np.int32)}, "a length must be at least 0"),
        ({"state_slot": np.array([3], np.int32)}, "names row 3 for sequence 0; a row must be between 0 and N - 1 = 2"),
        ({"query_start": np.array([0, 2], np.int32)}, "must rise from 0 to T = 1"),
        ({"key": np.zeros((1, 2, 8))}, "input 'key' has shape"),
        ({"decay": np.zeros((1, 2), np.float32)}, "input 'decay' has shape"),
        ({"recent_keys": np.zeros((3, 17, 2, 16), np.float32)}, "with R between 1 and 16"),
        ({"recent_updates": np.zeros((3, 8, 4, 24), np.float32)}, "input 'recent_updates' has shape"),
        ({"value": np.zeros((1, 3, 24))}, "input 'state' has shape"),
    ],
)
def test_what_is_not_allowed_is_refused(change, message):
    if devices.current() == "cuda" and ("past_len" in change or "state_slot" in change or "query_start" in change):
        pytest.skip("on CUDA lengths and slots stay on the device")
    states = fresh_states(SMALL) | {"state_len": np.array([4, 0, 0], np.int32)}
    change = {
        name: array.astype(devices.element()) if array.dtype == np.float64 else array for name, array in change.items()
    }
    tokens = delta_tokens(SMALL, 1)
    tokens |= {name: array for name, array in change.items() if name in tokens}
    states |= {name: array for name, array in change.items() if name in states}
    extra = {name: array for name, array in change.items() if name not in tokens | states}
    past = extra.pop("past_len", np.array([4], np.int32))
    lengths = np.diff(extra.pop("query_start")).tolist() if "query_start" in extra else [1]
    with pytest.raises(Exception, match="test/GatedDeltaRule") as error:
        delta_step(SMALL, tokens, states, lengths, past, **extra)
    assert message in str(error.value)


def test_two_sequences_in_one_row_are_refused():
    if devices.current() == "cuda":
        pytest.skip("on CUDA slots stay on the device")
    with pytest.raises(Exception, match="gives row 1 to two sequences"):
        delta_step(
            SMALL, delta_tokens(SMALL, 2), fresh_states(SMALL), [1, 1], [0, 0], state_slot=np.array([1, 1], np.int32)
        )
