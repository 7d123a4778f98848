"""Options refuse what they cannot mean."""

import dataclasses
from decimal import Decimal

import numpy as np
import pytest

from ortolan import Sampling, SnapKv
from ortolan.errors import ConfigError

BAD_SNAPKV = [
    {"budget": 0},
    {"budget": 2048.0},
    {"budget": 67},
    {"window": 0},
    {"window": 2**31, "budget": 2**40},
    {"kernel": 4},
    {"kernel": 0},
    {"sink": -1},
    {"pool": "mean"},
    {"granularity": "head"},
    {"group_reduce": "avg"},
    {"policy": "expect"},
    {"queries": 100},
    {"queries": 0, "policy": "expected"},
    {"queries": 9.0, "policy": "expected"},
    {"during_prefill": 1},
    {"pool": np.array(["avg", "max"])},
    {"during_prefill": True, "policy": "adakv"},
    {"during_prefill": True, "policy": "pyramidkv"},
    {"granularity": "layer", "policy": "adakv"},
    {"granularity": "model", "policy": "adakv"},
    {"granularity": "model", "policy": "pyramidkv"},
]
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


@pytest.mark.parametrize("options", BAD_SNAPKV, ids=str)
def test_snapkv_refuses(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        SnapKv(**options)


@pytest.mark.parametrize("options", BAD_SAMPLING, ids=str)
def test_sampling_refuses(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Sampling(**options)


@pytest.mark.parametrize("options", [SnapKv(), Sampling()])
def test_options_are_frozen_and_keyword_only(options):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(options, dataclasses.fields(options)[0].name, 1)
    with pytest.raises(TypeError):
        type(options)(1)


def test_the_smallest_budget_holds_window_and_sink():
    assert SnapKv(budget=68, window=64, sink=4).structure == {
        "policy": "snapkv",
        "kernel": 5,
        "pool": "avg",
        "granularity": "kv_head",
        "group_reduce": "mean",
    }


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, 64),
        ({"policy": "streaming", "window": 32}, 32),
        ({"policy": "expected"}, 256),
        ({"policy": "expected", "window": 300}, 300),
        ({"policy": "expected", "queries": 40}, 40),
    ],
)
def test_a_policy_says_how_many_queries_it_needs(options, rows):
    assert SnapKv(**options).captured_queries == rows
