"""Chooses few cases that hold every pair of values of a large product."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Case: TypeAlias = dict[str, Any]
Pair: TypeAlias = tuple[tuple[str, Any], tuple[str, Any]]

CANDIDATES = 30  # drawn for each case, of which the one with the most new pairs is taken


def pairwise_cases(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Case]:
    """Return cases, equal for equal seeds, in which any two values of different axes meet at least once.

    Source: Cohen et al., The AETG System, IEEE Transactions on Software Engineering 23(7), 1997.
    """
    rng, missing, cases = random.Random(seed), set(_all_pairs(axes)), []
    while missing:
        candidates = [_grow(axes, missing, rng) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda case: len(missing & set(pairs_of(case))))
        missing -= set(pairs_of(best))
        cases.append({name: best[name] for name in axes})
    return cases


def pairs_of(case: Case) -> Iterator[Pair]:
    """Yield every pair of values of a case, by name."""
    yield from itertools.combinations(sorted(case.items()), 2)


def _all_pairs(axes: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    for first, second in itertools.combinations(sorted(axes), 2):
        yield from itertools.product(((first, v) for v in axes[first]), ((second, v) for v in axes[second]))


def _grow(axes: Mapping[str, Sequence[Any]], missing: set[Pair], rng: random.Random) -> Case:
    """Start with a missing pair, and add axis after axis the value that holds most missing pairs."""
    case = dict(rng.choice(sorted(missing, key=repr)))
    for name in rng.sample(sorted(set(axes) - set(case)), len(axes) - len(case)):
        values = rng.sample(list(axes[name]), len(axes[name]))
        case[name] = max(values, key=lambda value: len(missing & set(pairs_of({**case, name: value}))))
    return case
