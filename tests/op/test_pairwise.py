"""The generator of the matrix covers what it says, with few cases."""

import itertools

import pytest
from pairwise import pairs_of, pairwise_cases

AXES = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False], "d": [0, 1, 2, 3], "e": [None]}


@pytest.mark.parametrize("seed", range(3))
def test_every_pair_is_there_in_few_cases(seed):
    cases = pairwise_cases(AXES, seed)
    found = {pair for case in cases for pair in pairs_of(case)}
    for first, second in itertools.combinations(sorted(AXES), 2):
        for pair in itertools.product(AXES[first], AXES[second]):
            assert ((first, pair[0]), (second, pair[1])) in found
    assert all(list(case) == list(AXES) and case[name] in AXES[name] for case in cases for name in AXES)
    assert 12 <= len(cases) <= 18, "3 x 4 is the least"


def test_equal_seeds_give_equal_cases():
    assert pairwise_cases(AXES, 1) == pairwise_cases(AXES, 1)
