"""The matrix of attention: pairs of values on the CPU, the whole product on a GPU where it is asked for.

    ORTOLAN_MATRIX=whole pytest -m cuda -n 10 tests/op/test_matrix.py -k test_whole

runs everything on a GPU in 216 tests and checks every query; `ORTOLAN_MATRIX=whole:3/8` runs the third eighth of the
tests. At the end a line counts the cases and names the largest error as a share of what is allowed.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable

import devices
import numpy as np
import pytest
from attention_matrix import (
    BATCHES,
    CHUNKS,
    HEAD_SIZES,
    HEADS,
    LENGTHS,
    MASKS,
    PAGES,
    SINKS,
    WINDOWS,
    MatrixCase,
    variants,
)
from matrix_runs import check_against_oracle, check_same_bits, run_case
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
    "mask": MASKS,
}
OUTER = ("length", "group", "head_size", "chunks")  # one test each; the rest are runs within it, on the same tokens


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
        check_against_oracle(results)
        if case.page_slots or not case.lse:
            base = dataclasses.replace(case, page_slots=0, lse=True)
            check_same_bits(results, run_case(base, devices.element()))


def outer_cases() -> list[tuple]:
    """Return the outer values to run: none unless asked for, else all or a part of them, the longest first."""
    wish, _, part = os.environ.get("ORTOLAN_MATRIX", "").partition(":")
    if wish != "whole":
        return []
    number, parts = map(int, (part or "1/1").split("/"))
    cases = itertools.product(*(sorted(AXES[name], reverse=name == "length") for name in OUTER))
    return list(cases)[number - 1 :: parts]


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["cuda-float16", "cuda-bfloat16"])
@pytest.mark.parametrize("values", outer_cases(), ids=str)
def test_whole(name, values, record_property):
    with devices.using(devices.TARGETS[name]):
        found = Findings()
        for window, sink, batch, mask in itertools.product(WINDOWS, SINKS, BATCHES, MASKS):
            outer = dict(zip(OUTER, values, strict=True))
            found.check(MatrixCase(**outer, window=window, sink=sink, batch=batch, mask=mask))
    record_property("matrix", (found.cases, found.worst))
    assert not found.problems, f"{len(found.problems)} of {found.cases} cases: " + "\n".join(found.problems[:10])


@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_slice_of_the_whole(chunks):
    found = Findings()
    with devices.using(devices.TARGETS["cpu-float32"]):
        for window, sink, batch in itertools.product((-1, 32), (0, 8), BATCHES):
            case = MatrixCase(window=window, sink=sink, group=4, head_size=64, length=300, chunks=chunks, batch=batch)
            found.check(case)
    assert (found.cases, found.problems) == (8 * 6, [])
    assert 0 < found.worst <= 1


@pytest.mark.parametrize("spoil", ["output", "lse"])
def test_findings_name_what_is_wrong(spoil):
    case = MatrixCase(window=32, sink=1, group=4, head_size=64, length=100, chunks="odd", batch="mixed")
    with devices.using(devices.TARGETS["cpu-float32"]):
        good, bad = run_case(case, devices.element()), run_case(case, devices.element())
        getattr(bad, spoil).storage.reshape(-1)[-5] += 1e-3
        check_same_bits(good, good)
        with pytest.raises(AssertionError, match=r"1 of .* differ"):
            check_same_bits(bad, good)
        with pytest.raises(AssertionError, match="of the error allowed"):
            check_against_oracle(bad, every_row=True)
        bad.output.storage.reshape(-1)[0] = np.nan
        with pytest.raises(AssertionError, match="does not see"):
            check_against_oracle(bad)


class Findings:
    """What many cases gave: how many there were, the largest error as a share of that allowed, and what was wrong."""

    def __init__(self) -> None:
        self.cases, self.worst = 0, 0.0
        self.problems: list[str] = []

    def check(self, base: MatrixCase) -> None:
        """Check all queries of a case, and the bits of the same case with other pages and outputs."""
        results = run_case(base, devices.element())
        self._note(base, lambda: check_against_oracle(results, every_row=True))
        for other in variants(base):
            if other != base:
                others = run_case(other, devices.element())
                self._note(other, lambda others=others: check_same_bits(others, results))

    def _note(self, case: MatrixCase, check: Callable[[], float | None]) -> None:
        self.cases += 1
        try:
            self.worst = max(self.worst, check() or 0.0)
        except AssertionError as error:
            self.problems.append(f"{name_of(case)}: {error}")
