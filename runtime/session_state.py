"""Describes a session so that it can be saved and restored: which rows of which caches are in use, and the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import file_path, whole_number
from ortolan.manifest import Manifest
from ortolan.policies import Eviction
from ortolan.runtime.buffers import Array
from ortolan.runtime.caches import CacheBuffers
from ortolan.runtime.fingerprint import Fingerprint
from ortolan.runtime.lengths import Lengths
from ortolan.runtime.plan import CachePlan, LayerPlan, slot_runs
from ortolan.runtime.sampler import Generation
from ortolan.runtime.session_file import Tensor, write_session_file

ELEMENT_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
SlotRuns = list[tuple[int, int]]  # (first slot, count) each


@dataclass(slots=True, kw_only=True)
class SessionState:
    """All that a session knows besides its model; `lengths` are its own copy, the caches are shared."""

    plan: CachePlan
    snapkv: Eviction | None
    capture_rows: int
    caches: CacheBuffers
    capacities: list[int]
    lengths: Lengths
    history: list[int]
    pending: list[int]
    variant: int
    generation: Generation | None
    finish_reason: str | None
    captured_at_eviction: dict[int, Array]


def save_state(
    path: str | Path, state: SessionState, manifest: Manifest, identity: Fingerprint, rewind_tokens: int
) -> None:
    """Write a state to a file. Raises as `Session.save` does."""
    file, rewind_tokens = file_path("path", path), whole_number("rewind_tokens", rewind_tokens, 0)
    firsts = [
        _first_kept(state, layer, manifest.sink, rewind_tokens) if layer.kind == "ring" else 0
        for layer in state.plan.layers
    ]
    tensors = [
        Tensor(name="history", element_type="I32", shape=(len(state.history),), parts=lambda: [_int32(state.history)]),
        *_cache_tensors(state, manifest, firsts),
        *_capture_tensors(state, manifest),
        *_logit_tensors(state, manifest),
    ]
    write_session_file(file, _describe(state, identity, firsts), tensors)


def _describe(state: SessionState, identity: Fingerprint, firsts: list[int]) -> dict[str, Any]:
    """Return all that is no tensor, as JSON holds it."""
    lengths, turn, plan = state.lengths, state.generation, state.plan
    generation = None
    if turn:
        sampling = dataclasses.asdict(turn.sampling)
        generation = {"sampling": sampling, "max_new_tokens": turn.max_new_tokens, "count": turn.count}
    layers = [
        {"capacity": capacity, "planned": layer.capacity, "first": first}
        for capacity, layer, first in zip(state.capacities, plan.layers, firsts, strict=True)
    ]
    return {
        "model": identity,
        "plan": {"max_context": plan.max_context, "chunk_size": plan.chunk_size, "slot_tile": plan.slot_tile},
        "snapkv": None if state.snapkv is None else state.snapkv.options_dict(),
        "layers": layers,
        "lengths": {
            "logical": lengths.logical,
            "evicted_at": lengths.evicted_at,
            "captured_from": lengths.captured_from,
            "physical": {str(index): held.tolist() for index, held in lengths.physical.items()},
        },
        "pending": state.pending,
        "variant": state.variant,
        "generation": generation,
        "finish_reason": state.finish_reason,
    }


def _first_kept(state: SessionState, layer: LayerPlan, sink: int, rewind_tokens: int) -> int:
    """Return the first position past the sinks that is saved of a ring: its window's, or one before for a rewind."""
    lengths, window_before = state.lengths, layer.window - 1
    wanted = lengths.logical - _tokens_to_read_again(state) - rewind_tokens - window_before
    written_over = lengths.highest - (layer.capacity - sink)
    left_out = lengths.rings_from - window_before  # where the session was restored itself
    return min(max(sink, wanted, written_over, left_out), lengths.logical)


def _tokens_to_read_again(state: SessionState) -> int:
    """Return how many of the last tokens the next eviction may need to read again, for their queries."""
    lengths = state.lengths
    oldest_query = max(0, lengths.logical + 1 - state.capture_rows)
    if not state.capture_rows or lengths.captured_from <= oldest_query:
        return 0
    return lengths.logical - max(oldest_query, lengths.evicted_at)


def ring_runs(first: int, length: int, capacity: int, sink: int) -> SlotRuns:
    """List the slots of what is saved of a ring: the sinks, then positions first .. length."""
    return [(0, min(sink, length)), *slot_runs(first, length, capacity, sink)]


def capture_runs(first: int, end: int, rows: int) -> SlotRuns:
    """List the rows of the captured queries of positions first .. end, at most the last `rows`."""
    return list(slot_runs(max(first, end - rows), end, rows, 0)) if rows else []


def head_runs(state: SessionState, index: int, first: int, sink: int) -> list[SlotRuns]:
    """List the slots in use of each kv head of a layer."""
    layer, lengths = state.plan.layers[index], state.lengths
    heads = state.caches.layers[index].key.shape[1]
    if layer.kind == "ring":
        return [ring_runs(first, lengths.logical, layer.capacity, sink)] * heads
    held = lengths.physical.get(index, np.full(heads, lengths.logical))
    return [[(0, int(count))] for count in held]


def _cache_tensors(state: SessionState, manifest: Manifest, firsts: list[int]) -> Iterator[Tensor]:
    """Describe keys and values, [rows of all kv heads behind one another, D]."""
    for index, layer in enumerate(manifest.layers):
        runs = head_runs(state, index, firsts[index], manifest.sink)
        count = sum(number for head in runs for _, number in head)
        for side, name in enumerate(("key", "value")):
            yield Tensor(
                name=f"layer.{index}.{name}",
                element_type=ELEMENT_TYPES[manifest.dtype],
                shape=(count, layer.head_size),
                parts=partial(_download, state.caches, index, runs, side),
            )


def _download(caches: CacheBuffers, index: int, runs: list[SlotRuns], side: int) -> Iterator[npt.NDArray[Any]]:
    for head, slots in enumerate(runs):
        for begin, count in slots:
            for block in caches.blocks(index, head, begin, count):
                yield caches.buffers.download(block[side])


def _download_rows(caches: CacheBuffers, capture: Array, runs: SlotRuns) -> Iterator[npt.NDArray[Any]]:
    for begin, count in runs:
        with caches.buffers.scope():
            rows = capture[0, begin : begin + count]
        yield caches.buffers.download(rows)


def _capture_tensors(state: SessionState, manifest: Manifest) -> Iterator[Tensor]:
    """Describe captured queries, [rows, Hq, D] in the order of their positions, and kept positions, [Hkv, K]."""
    lengths, rows = state.lengths, state.capture_rows
    kinds = {
        "capture": (state.caches.captures, lengths.captured_from, lengths.logical),
        "captured_at_eviction": (state.captured_at_eviction, 0, lengths.evicted_at),
    }
    for name, (arrays, first, end) in kinds.items():
        for index, array in arrays.items():
            runs = capture_runs(first, end, rows)
            yield Tensor(
                name=f"layer.{index}.{name}",
                element_type=ELEMENT_TYPES[manifest.dtype],
                shape=(sum(count for _, count in runs), *array.shape[2:]),
                parts=partial(_download_rows, state.caches, array, runs),
            )
    for index, kept in lengths.kept.items():
        yield Tensor(
            name=f"layer.{index}.kept",
            element_type="I32",
            shape=kept.shape,
            parts=partial(list, [kept]),
        )


def _logit_tensors(state: SessionState, manifest: Manifest) -> Iterator[Tensor]:
    """Describe the logits that a generation begins with, [V], where it has not begun."""
    turn = state.generation
    if turn and turn.count == 0:
        yield Tensor(
            name="logits",
            element_type="F32",
            shape=(manifest.vocab_size,),
            parts=lambda: [state.caches.buffers.download(turn.logits)],
        )


def _int32(values: list[int]) -> npt.NDArray[np.int32]:
    return np.fromiter(values, np.int32, len(values))
