"""Sampling leaves the same distribution as transformers' logits processors."""

import numpy as np
import pytest
import torch
from ortolan.runtime import Sampling
from ortolan.runtime.sampler import Sampler, distribution, penalize
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ortolan.errors import ConfigError

HISTORY = [3, 3, 7, 11]


def logits(seed=0, size=50):
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_k=5),
        Sampling(temperature=1.0, top_p=0.8),
        Sampling(temperature=0.9, min_p=0.1),
        Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.5),
    ],
)
def test_distribution_equals_transformers(options):
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(options.repetition_penalty)])
    processors.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        processors.append(TopKLogitsWarper(options.top_k))
    processors.append(TopPLogitsWarper(options.top_p))
    if options.min_p:
        processors.append(MinPLogitsWarper(options.min_p))
    scores = processors(torch.tensor([HISTORY]), torch.tensor(logits())[None])
    expected = torch.softmax(scores.double(), -1)[0].numpy()
    got = distribution(penalize(logits(), HISTORY, options.repetition_penalty), options)
    np.testing.assert_allclose(got, expected, atol=np.finfo(np.float32).eps)


def test_zero_temperature_takes_the_best_and_seeds_repeat():
    assert Sampler(Sampling()).choose(logits(), []) == int(np.argmax(logits()))
    draws = [
        [Sampler(Sampling(temperature=1.0, seed=s)).choose(logits(i), []) for i in range(20)]
        for s in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_draws_follow_the_distribution():
    options = Sampling(temperature=1.0, top_k=3, seed=5)
    sampler = Sampler(options)
    counts = np.bincount([sampler.choose(logits(), []) for _ in range(4000)], minlength=50) / 4000
    expected = distribution(logits(), options)
    assert np.abs(counts - expected).max() < 5 * np.sqrt(0.25 / 4000)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
    ],
)
def test_options_are_checked(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Sampling(**options)
