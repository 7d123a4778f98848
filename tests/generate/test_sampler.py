"""The host's choice of tokens: the exact rule, transformers' probabilities, and what is refused."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from sampling_reference import assert_follows, choose_by_the_rule, distribution, draw_logits
from tolerances import FIXED_POINT, FLOAT32

from ortolan import Sampling
from ortolan.runtime.generate.draw import BAD, Draw
from ortolan.runtime.generate.sampler import choose, penalize

VOCABULARY = 50
CASES = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t, k, p, m in itertools.product((0.3, 1.0, 2.5), (0, 1, 7, 80), (1.0, 0.9, 0.05), (0.0, 0.2))
]


def draw(seed: int = 0, position: int = 0, seen=(), **options) -> Draw:
    return Draw(sampling=Sampling(**options), seed=seed, position=position, seen=seen)


def reference(logits: np.ndarray, options: Sampling) -> np.ndarray:
    warpers = [transformers.TemperatureLogitsWarper(options.temperature)]
    if options.top_k:
        warpers.append(transformers.TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(options.top_p))
    if options.min_p:
        warpers.append(transformers.MinPLogitsWarper(options.min_p))
    scores = torch.from_numpy(logits)[None].double()
    for warper in warpers:
        scores = warper(None, scores)
    return torch.softmax(scores, -1)[0].numpy()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_distribution_of_transformers(case):
    options, logits, rows = Sampling(**case), draw_logits(1, VOCABULARY, seed=2), 800
    expected = reference(logits[0], options)
    np.testing.assert_allclose(distribution(logits[0], options), expected, rtol=FIXED_POINT)
    common = Draw(sampling=options, seed=9, position=0)
    draws = [dataclasses.replace(common, position=position) for position in range(rows)]
    assert_follows(np.array(choose(np.repeat(logits, rows, axis=0), draws)), expected)


@given(
    size=st.sampled_from([1, 2, 50, 511, 512, 513, 1700]),
    values=st.sampled_from([1.0, 3.0, 40.0, 1e30]),
    equal=st.booleans(),
    temperature=st.sampled_from([1e-3, 0.7, 1.0, 4.0, 1e6]),
    top_k=st.sampled_from([0, 1, 5, 600]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    penalty=st.sampled_from([1.0, 1.7]),
    seed=st.integers(0, 2**64),
    position=st.integers(0, 2**31),
)
def test_choices_are_exactly_those_of_the_rule(
    size, values, equal, temperature, top_k, top_p, min_p, penalty, seed, position
):
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((1, size)) * values).astype(np.float32)
    if equal:
        logits = np.round(logits)  # many are equal, and both zeros are there
    options = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    seen = random.integers(0, size, 5).tolist()
    expected = choose_by_the_rule(logits[0], options, seed, position, seen)
    assert choose(logits, [Draw(sampling=options, seed=seed, position=position, seen=seen)]) == [expected]


def test_a_choice_depends_on_its_own_row_alone():
    logits = draw_logits(9, 700)
    draws = [
        None if row == 4 else draw(seed=row // 2, position=row, temperature=row % 3, repetition_penalty=1 + row % 2)
        for row in range(9)
    ]
    together = choose(logits, draws)
    assert together == [choose(logits[row : row + 1], [draws[row]])[0] for row in range(9)]
    assert together[4] == 0
    np.testing.assert_array_equal(logits, draw_logits(9, 700))


def test_seed_and_position_give_other_tokens():
    logits = np.zeros((200, 1000), np.float32)
    by_seed = choose(logits, [draw(seed=seed, temperature=1.0) for seed in range(200)])
    by_position = choose(logits, [draw(position=position, temperature=1.0) for position in range(200)])
    assert min(len(set(by_seed)), len(set(by_position))) > 150
    assert by_seed[1:] != by_position[1:]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("case", [None, {}, {"temperature": 1.0}, {"repetition_penalty": 2.0}], ids=str)
def test_rows_with_nan_or_infinity_are_told(bad, case):
    logits = draw_logits(3, VOCABULARY)
    logits[1, 17] = bad
    wanted = None if case is None else draw(**case)
    tokens = choose(logits, [wanted] * 3)
    assert tokens[1] == BAD
    assert BAD not in (tokens[0], tokens[2])


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_penalty_is_that_of_transformers(penalty):
    logits, seen = draw_logits(1, VOCABULARY)[0], [3, 3, 7, 49, 0]
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([seen]), torch.from_numpy(logits.copy())[None])[0].numpy()
    np.testing.assert_allclose(penalize(logits, seen, penalty), expected, rtol=FLOAT32)
    np.testing.assert_array_equal(logits, draw_logits(1, VOCABULARY)[0])


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_extreme_penalty_leaves_a_choice(penalty, temperature):
    logits = np.array([[3e38, -3e38, 1, 0]], np.float32)
    wanted = draw(temperature=temperature, repetition_penalty=penalty, seen=[0, 1])
    assert np.isfinite(penalize(logits[0], [0, 1], penalty)).all()
    assert choose(logits, [wanted]) == [0]


def test_temperature_zero_takes_the_first_of_the_largest():
    assert choose(np.array([[1, 4, 4, 0], [0, 0, 0, 0]], np.float32), [draw()] * 2) == [1, 0]


def test_a_tiny_temperature_is_greedy():
    logits = draw_logits(1, VOCABULARY, seed=1)
    assert choose(logits, [draw(temperature=1e-300)]) == [int(logits.argmax())]


def test_a_huge_temperature_takes_all_alike():
    logits = np.repeat(np.array([[-3, 0, 3]], np.float32), 900, axis=0)
    drawn = choose(logits, [draw(temperature=1e300, position=position) for position in range(900)])
    assert_follows(np.array(drawn), np.full(3, 1 / 3))
    assert choose(np.array([[-3e38, 3e38]], np.float32), [draw(temperature=1e300)]) == [1]  # their distance overflows


def test_the_penalty_also_holds_for_greedy():
    assert choose(np.array([[3, 4, 1]], np.float32), [draw(repetition_penalty=2.0, seen=[1])]) == [0]
