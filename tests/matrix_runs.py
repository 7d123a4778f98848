"""Runs cases of the attention matrix on the device under test, and compares results where they are.

A case's tokens lie in the order in which its steps feed them, so that a step is a view: between two steps nothing is
copied, and on a GPU nothing is waited for.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import devices
import numpy as np
from attention_matrix import HEADS, PREFIX_END, MatrixCase, rows_of
from matrix_oracle import expect, share_of_allowed
from resident import BoundOperator, Resident

ROW_INTS = 64  # between the lengths of two steps, so that each begins at an aligned address


@dataclass(frozen=True, kw_only=True)
class Steps:
    """All tokens of a case, step by step, on the device; cases that differ in the rest share them.

    Attributes:
        query, key, value: [T, heads, D].
        begins: the first row of each step, and T.
        query_start, past_len: [steps, ROW_INTS] int32, of which the first B + 1 and B count.
        places: of each sequence's positions, the rows; [L] each.
        lse_places: the same in what [Hq, T] of all steps are one behind the other; [Hq, L] each.
    """

    query: Resident
    key: Resident
    value: Resident
    begins: list[int]
    query_start: Resident
    past_len: Resident
    places: list[np.ndarray]
    lse_places: list[np.ndarray]


def steps_of(case: MatrixCase, element: np.dtype) -> Steps:
    """Lay out a case's tokens."""
    shared = dataclasses.replace(case, window=-1, sink=0, page_slots=0, lse=True, mask="causal")
    return _steps_of(shared, element, devices.current())


@functools.lru_cache(maxsize=4)
def _steps_of(case: MatrixCase, element: np.dtype, device: str) -> Steps:
    assert device == devices.current()
    rows, ranges = rows_of(case, element), list(case.steps())
    spans = [(sequence, a, b) for step in ranges for sequence, (a, b) in enumerate(step)]
    counts = np.array([[b - a for a, b in step] for step in ranges])  # [steps, B]
    begins = np.cumsum([0, *counts.sum(axis=1)])
    starts, past = (np.zeros((len(ranges), ROW_INTS), np.int32) for _ in range(2))
    starts[:, 1 : counts.shape[1] + 1] = np.cumsum(counts, axis=1)
    past[:, : counts.shape[1]] = [[a for a, _ in step] for step in ranges]
    places, lse_places = _places(case, counts, begins)
    packed = {
        port: Resident.of(np.concatenate([getattr(rows[sequence], port)[a:b] for sequence, a, b in spans]))
        for port in ("query", "key", "value")
    }
    return Steps(
        **packed,
        begins=begins.tolist(),
        query_start=Resident.of(starts),
        past_len=Resident.of(past),
        places=places,
        lse_places=lse_places,
    )


def _places(case: MatrixCase, counts: np.ndarray, begins: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return where each sequence's rows lie in all outputs, and in all log-sum-exps."""
    heads = np.arange(HEADS[case.group][0])[:, None]
    places: list[list[np.ndarray]] = [[] for _ in case.lengths]
    lse_places: list[list[np.ndarray]] = [[] for _ in case.lengths]
    for step, step_counts in enumerate(counts):
        first = 0
        for sequence, count in enumerate(step_counts):
            rows = np.arange(first, first + count)
            places[sequence].append(begins[step] + rows)
            lse_places[sequence].append(begins[step] * len(heads) + heads * step_counts.sum() + rows)
            first += count
    return [np.concatenate(p) for p in places], [np.concatenate(p, axis=1) for p in lse_places]


def make_caches(case: MatrixCase, element: np.dtype) -> dict[str, Resident]:
    """Make key and value caches full of NaN, and where they are paged a table of shuffled pages."""
    sequences, kv_heads = len(case.lengths), HEADS[case.group][1]
    slots, pages, inputs = case.capacity, sequences, {}
    if case.page_slots:
        each = slots // case.page_slots
        slots, pages = case.page_slots, sequences * each + 2
        table = np.random.default_rng(7).permutation(pages)[: sequences * each].reshape(sequences, each)
        inputs["block_table"] = Resident.of(table.astype(np.int32))
    shape = (pages, kv_heads, slots, case.head_size)
    return {**{port: Resident.poisoned(shape, element) for port in ("key_cache", "value_cache")}, **inputs}


@dataclass(frozen=True, kw_only=True)
class Results:
    """What all steps of a case gave: output [T, Hq, D], and [Hq, T] of each step one behind the other, or None."""

    case: MatrixCase
    steps: Steps
    output: Resident
    lse: Resident | None


def run_case(case: MatrixCase, element: np.dtype) -> Results:
    """Read all sequences of a case, step by step, on the device under test."""
    with devices.on_stream():
        steps, caches = steps_of(case, element), make_caches(case, element)
        heads, size = HEADS[case.group][0], case.head_size
        output = Resident.poisoned(steps.query.shape, element)
        lse = Resident.poisoned((heads * steps.begins[-1],), np.dtype(np.float32)) if case.lse else None
        results = Results(case=case, steps=steps, output=output, lse=lse)
        first = step_inputs(steps, 0, len(case.lengths))
        appended = {port: first[port] for port in ("key", "value", "query_start", "past_len")}
        attended = {port: first[port] for port in ("query", "query_start", "past_len")}
        ports = ("output", "lse") if case.lse else ("output",)
        append = BoundOperator("RingKvAppend", caches, appended, (), sink=case.sink)
        causal = int(case.mask != "both")
        prefixes = {}
        if case.mask == "prefix":
            prefixes["prefix_end"] = Resident.of(np.full(len(case.lengths), PREFIX_END, np.int32))
        attend = BoundOperator(
            "SwaAttention", caches | prefixes, attended, ports, window=case.window, sink=case.sink, causal=causal
        )
        for number, (begin, end) in enumerate(zip(steps.begins, steps.begins[1:], strict=False)):
            inputs = step_inputs(steps, number, len(case.lengths))
            append.run({port: inputs[port] for port in appended}, {})
            outputs = {"output": output.part(begin * heads * size, (end - begin, heads, size))}
            if lse is not None:
                outputs["lse"] = lse.part(begin * heads, (heads, end - begin))
            attend.run({port: inputs[port] for port in attended}, outputs)
    return results


def step_inputs(steps: Steps, number: int, sequences: int) -> dict[str, Resident]:
    """Return one step's views of tokens and lengths."""
    begin, end = steps.begins[number], steps.begins[number + 1]
    inputs = {
        "query_start": steps.query_start.part(number * ROW_INTS, (sequences + 1,)),
        "past_len": steps.past_len.part(number * ROW_INTS, (sequences,)),
    }
    for port in ("query", "key", "value"):
        array: Resident = getattr(steps, port)
        _, heads, size = array.shape
        inputs[port] = array.part(begin * heads * size, (end - begin, heads, size))
    return inputs


def check_against_oracle(results: Results, *, every_row: bool = False) -> float:
    """Compare each sequence with float64, allowing what float32 of the stored type is off.

    Returns the largest error as a share of what is allowed.
    """
    case, element, steps = results.case, results.output.dtype, results.steps
    worst, xp = 0.0, devices.array_module()
    with devices.on_stream():
        output = devices.widen(results.output.storage, np.float32).reshape(results.output.shape)
        assert bool(xp.isfinite(output).all()), "a query read a slot that it does not see"
        for sequence in range(len(case.lengths)):
            expected = expect(case, element, sequence, every_row=every_row)
            rows = xp.asarray(steps.places[sequence][expected.positions])
            shares = [share_of_allowed(output[rows], expected.plain[0], expected.exact[0], element)]
            if results.lse is not None:
                places = xp.asarray(steps.lse_places[sequence][:, expected.positions])
                sums = results.lse.storage.reshape(-1)[places]
                size = case.head_size**0.5 / 8  # products of more columns are larger before they cancel
                of_type = np.dtype(np.float32)
                shares.append(share_of_allowed(sums, expected.plain[1], expected.exact[1], of_type, max(1.0, size)))
            assert all(share <= 1 for share in shares), f"sequence {sequence}: {shares} of the error allowed"
            worst = max(worst, *shares)
    return worst


def check_same_bits(results: Results, expected: Results) -> None:
    """Compare every query of each sequence bit for bit, and the log-sum-exp where both have it."""
    pairs: list[tuple[str, Any, Any]] = [("outputs", results.output, expected.output)]
    if results.lse is not None and expected.lse is not None:
        pairs.append(("log-sum-exps", results.lse, expected.lse))
    with devices.on_stream():
        for name, got, want in pairs:
            differing = int((got.flat_bits() != want.flat_bits()).sum())
            assert not differing, f"{differing} of {np.prod(want.shape)} {name} differ"
