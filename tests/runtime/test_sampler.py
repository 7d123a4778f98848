"""Sampling against transformers' logits processors."""

import itertools

import numpy as np
import pytest
import torch
import transformers

from ortolan import Sampling
from ortolan.runtime.sampler import Sampler, distribution, penalize

VOCABULARY = 50
CASES = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t, k, p, m in itertools.product((0.3, 1.0, 2.5), (0, 1, 7, 80), (1.0, 0.9, 0.05), (0.0, 0.2))
]


def draw_logits(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCABULARY) * 3).astype(np.float32)


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
def test_distribution_is_that_of_transformers(case):
    options = Sampling(**case)
    for seed in range(3):
        expected = reference(draw_logits(seed), options)
        actual = distribution(draw_logits(seed), options)
        np.testing.assert_array_equal(actual > 0, expected > 0)
        np.testing.assert_allclose(actual, expected, rtol=1e-9)


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_penalty_is_that_of_transformers(penalty):
    logits, history = draw_logits(0), [3, 3, 7, 49, 0]
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([history]), torch.from_numpy(logits.copy())[None])[0].numpy()
    np.testing.assert_allclose(penalize(logits, history, penalty), expected, rtol=1e-6)
    np.testing.assert_array_equal(logits, draw_logits(0))


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_an_extreme_penalty_leaves_numbers(penalty):
    logits, options = np.array([3e38, -3e38, 1, 0], np.float32), Sampling(temperature=1.0, repetition_penalty=penalty)
    penalized = penalize(logits, [0, 1], penalty)
    assert np.isfinite(penalized).all()
    assert np.isfinite(distribution(penalized, options)).all()


def test_temperature_zero_takes_the_first_of_the_largest():
    assert Sampler(Sampling()).choose(np.array([1, 4, 4, 0], np.float32), []) == 1


def test_a_tiny_temperature_is_greedy():
    logits = draw_logits(1)
    assert Sampler(Sampling(temperature=1e-300, seed=0)).choose(logits, []) == int(np.argmax(logits))


def test_the_penalty_also_holds_for_greedy():
    assert Sampler(Sampling(repetition_penalty=2.0)).choose(np.array([3, 4, 1], np.float32), [1]) == 0


def test_draws_follow_the_distribution_and_the_seed():
    options = Sampling(temperature=1.0, top_k=4, seed=11)
    logits = draw_logits(2)
    first, second = (
        [sampler.choose(logits, []) for _ in range(4000)] for sampler in (Sampler(options), Sampler(options))
    )
    assert first == second
    counts = np.bincount(first, minlength=VOCABULARY) / len(first)
    assert np.abs(counts - distribution(logits, options)).max() < 5 * 0.5 / np.sqrt(len(first))
    other = Sampler(Sampling(temperature=1.0, top_k=4, seed=12))
    assert [other.choose(logits, []) for _ in range(50)] != first[:50]
