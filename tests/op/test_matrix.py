"""The matrix of attention: pairs of values on the CPU, the whole product on a GPU where it is asked for.

On a GPU, `ORTOLAN_MATRIX=whole` runs everything, and `ORTOLAN_MATRIX=whole:3/8` the third eighth of it.
"""

import dataclasses
import itertools
import os

import devices
import numpy as np
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
    Attended,
    MatrixCase,
    checked_rows,
    oracle,
    rows_of,
    run_case,
    variants,
)
from pairwise import pairwise_cases
from tolerances import assert_as_good_as_plain

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
PAIRS = [MatrixCase(**case) for case in pairwise_cases(AXES)]

pytestmark = pytest.mark.usefixtures("target")


def name_of(case: MatrixCase) -> str:
    return "-".join(str(value) for value in dataclasses.astuple(case))


def check_against_oracle(case: MatrixCase, results: list[Attended]) -> None:
    """Compare some rows of each sequence with float64, allowing what float32 of the stored type is off."""
    for rows, got in zip(rows_of(case, devices.element()), results, strict=True):
        assert np.isfinite(got.output.astype(np.float32)).all(), "a query read a slot that it does not see"
        positions = checked_rows(case, len(got.output))
        expected, plain = (oracle(case, rows, positions, kind) for kind in (np.float64, np.float32))
        assert_as_good_as_plain(got.output[positions], plain[0], expected[0])
        if got.lse is not None:
            assert_as_good_as_plain(got.lse[:, positions], plain[1], expected[1])


def check_same_bits(results: list[Attended], expected: list[Attended]) -> None:
    for got, want in zip(results, expected, strict=True):
        devices.assert_same_bits(got.output, want.output)
        if got.lse is not None:
            devices.assert_same_bits(got.lse, want.lse)


@pytest.mark.parametrize("case", PAIRS, ids=name_of)
def test_pairs(case):
    results = run_case(case, devices.element())
    check_against_oracle(case, results)
    if case.page_slots or not case.lse:
        check_same_bits(results, run_case(dataclasses.replace(case, page_slots=0, lse=True), devices.element()))


def outer_cases() -> list[tuple]:
    """Return the outer values to run: none unless asked for, else all or a part of them."""
    wish, _, part = os.environ.get("ORTOLAN_MATRIX", "").partition(":")
    if wish != "whole":
        return []
    number, parts = map(int, (part or "1/1").split("/"))
    return list(itertools.product(*(AXES[name] for name in OUTER)))[number - 1 :: parts]


@pytest.mark.cuda
@pytest.mark.parametrize("values", outer_cases(), ids=str)
def test_whole(target, values):
    if target.device == "cpu" or target.element == np.float32:
        pytest.skip("the whole product is for the 16-bit types on a GPU")
    problems = []
    for length, chunks, batch in itertools.product(LENGTHS, CHUNKS, BATCHES):
        outer = dict(zip(OUTER, values, strict=True))
        base = MatrixCase(**outer, length=length, chunks=chunks, batch=batch)
        results = run_case(base, target.element)
        checks = [(base, check_against_oracle, (base, results))]
        checks += [
            (other, check_same_bits, (run_case(other, target.element), results))
            for other in variants(base)
            if other != base
        ]
        for case, check, arguments in checks:
            try:
                check(*arguments)
            except AssertionError as error:
                problems.append(f"{name_of(case)}: {error}")
    assert not problems, f"{len(problems)} of the cases: " + "\n".join(problems[:10])
