"""The matrix of attention: pairs of values on the CPU, the whole product on a GPU where it is asked for.

On a GPU, `ORTOLAN_MATRIX=whole` runs everything, and `ORTOLAN_MATRIX=whole:3/8` the third eighth of it; eighths can
run side by side on one GPU, as most of the time goes to the host.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable

import devices
import pytest
from attention_matrix import (
    BATCHES,
    CHUNKS,
    HEAD_SIZES,
    HEADS,
    LENGTHS,
    PAGES,
    SINKS,
    WINDOWS,
    MatrixCase,
    check_against_oracle,
    check_same_bits,
    run_case,
    variants,
)
from pairwise import pairwise_cases

AXES = {
    "window": WINDOWS,
    "sink": SINKS,
    "group": tuple(HEADS),
    "head_size": HEAD_SIZES,
    "length": LENGTHS,
    "chunks": CHUNKS,
    "batch": BATCHES,
    "page_slots": PAGES,
    "lse": (True, False),
}
OUTER = ("window", "sink", "group", "head_size")  # one test each; the rest are runs within it


def name_of(case: MatrixCase) -> str:
    return "-".join(str(value) for value in dataclasses.astuple(case))


def pair_params() -> list:
    """Return pairs for each device; the element type is one of the axes."""
    params = []
    for device in ("cpu", "cuda"):
        names = [name for name, target in devices.TARGETS.items() if target.device == device]
        marks = [pytest.mark.cuda] if device == "cuda" else []
        for values in pairwise_cases({**AXES, "target": names}):
            name = values.pop("target")
            case = MatrixCase(**values)
            params.append(pytest.param(name, case, id=f"{name}-{name_of(case)}", marks=marks))
    return params


@pytest.mark.parametrize(("name", "case"), pair_params())
def test_pairs(name, case):
    with devices.using(devices.TARGETS[name]):
        results = run_case(case, devices.element())
        check_against_oracle(case, results)
        if case.page_slots or not case.lse:
            base = dataclasses.replace(case, page_slots=0, lse=True)
            check_same_bits(results, run_case(base, devices.element()))


def outer_cases() -> list[tuple]:
    """Return the outer values to run: none unless asked for, else all or a part of them."""
    wish, _, part = os.environ.get("ORTOLAN_MATRIX", "").partition(":")
    if wish != "whole":
        return []
    number, parts = map(int, (part or "1/1").split("/"))
    return list(itertools.product(*(AXES[name] for name in OUTER)))[number - 1 :: parts]


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["cuda-float16", "cuda-bfloat16"])
@pytest.mark.parametrize("values", outer_cases(), ids=str)
def test_whole(name, values):
    with devices.using(devices.TARGETS[name]):
        problems = problems_of(dict(zip(OUTER, values, strict=True)))
    assert not problems, f"{len(problems)} of the cases: " + "\n".join(problems[:10])


def problems_of(outer: dict) -> list[str]:
    """Run all cases with these outer values; say what is wrong with which."""
    problems, element = [], devices.element()
    for length, chunks, batch in itertools.product(LENGTHS, CHUNKS, BATCHES):
        base = MatrixCase(**outer, length=length, chunks=chunks, batch=batch)
        results = run_case(base, element)
        problems += problem(base, check_against_oracle, base, results)
        for other in variants(base):
            if other != base:
                problems += problem(other, check_same_bits, run_case(other, element), results)
    return problems


def problem(case: MatrixCase, check: Callable[..., None], *arguments: object) -> list[str]:
    try:
        check(*arguments)
    except AssertionError as error:
        return [f"{name_of(case)}: {error}"]
    return []
