"""Sampling options refuse what they cannot mean."""

import dataclasses
from decimal import Decimal

import numpy as np
import pytest

from ortolan import Sampling
from ortolan.errors import ConfigError

BAD_SAMPLING = [
    {"temperature": -0.1},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"top_k": -1},
    {"top_k": 2.5},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"repetition_penalty": 0.0},
    {"seed": -1},
    {"seed": 0.5},
    {"temperature": "0.7"},
    {"temperature": None},
    {"top_k": None},
    {"top_p": "a"},
    {"repetition_penalty": []},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 1e7},
    {"seed": "a"},
    {"temperature": 10**400},
    {"top_p": np.array([0.5, 0.5])},
    {"min_p": Decimal("sNaN")},
    {"temperature": True},
]


@pytest.mark.parametrize("options", BAD_SAMPLING, ids=str)
def test_sampling_refuses(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Sampling(**options)


def test_options_are_frozen_and_keyword_only():
    options = Sampling()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.temperature = 1
    with pytest.raises(TypeError):
        Sampling(1)
