"""Writes a sequence to a file: which rows of which caches are in use, and all else that is known of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.element_types import element_type
from ortolan.errors import file_path, whole_number
from ortolan.runtime.caches.attention import SlotRuns
from ortolan.runtime.caches.layer_state import kind_of, own_layers
from ortolan.runtime.device.buffers import Array
from ortolan.runtime.saved.file import Tensor, write_session_file
from ortolan.runtime.saved.fingerprint import Fingerprint
from ortolan.runtime.saved.state import SavedParts, capture_runs


def save_sequence(path: str | Path, parts: SavedParts, identity: Fingerprint, rewind_tokens: int) -> None:
    """Write a sequence to a file. Raises as `Session.save` does."""
    file, rewind_tokens = file_path("path", path), whole_number("rewind_tokens", rewind_tokens, 0)
    firsts = {index: _first_kept(parts, index, rewind_tokens) for index in own_layers(parts.manifest)}
    history = parts.state.tokens[: parts.lengths.logical]
    tensors = [
        Tensor(name="history", element_type="I32", shape=(len(history),), parts=lambda: [_int32(history)]),
        *_cache_tensors(parts, firsts),
        *_capture_tensors(parts),
        *_kept_tensors(parts),
    ]
    write_session_file(file, _describe(parts, identity, firsts), tensors)


def _describe(parts: SavedParts, identity: Fingerprint, firsts: dict[int, int]) -> dict[str, Any]:
    """Return all that is not a tensor, as JSON holds it."""
    lengths, plan = parts.lengths, parts.plan
    layers = [
        {"capacity": parts.caches.capacity(index), "planned": layer.capacity, "first": firsts[index]}
        if index in firsts
        else {"capacity": 0, "planned": 0, "first": 0}
        for index, layer in enumerate(plan.layers)
    ]
    return {
        "model": identity,
        "plan": {"max_context": plan.max_context, "chunk_size": plan.chunk_size, "slot_tile": plan.slot_tile},
        "eviction": None if parts.eviction is None else parts.eviction.options_dict(),
        "layers": layers,
        "lengths": {
            "logical": lengths.logical,
            "evicted_at": lengths.evicted_at,
            "captured_from": lengths.captured_from,
            "counts": {str(index): counts.tolist() for index, counts in lengths.counts.items()},
        },
        "pending": parts.state.tokens[lengths.logical :],
        "variant": parts.state.variant,
        "generation": parts.generation,
        "finish_reason": parts.finish_reason,
    }


def _first_kept(parts: SavedParts, index: int, rewind_tokens: int) -> int:
    """Return the first position past the sinks that is saved of a ring: its window's, or one before for a rewind."""
    layer, lengths, sink = parts.plan.layers[index], parts.lengths, parts.manifest.sink
    if layer.kind != "ring":
        return 0
    window_before, capacity = layer.window - 1, parts.caches.capacity(index)
    wanted = lengths.logical - _tokens_to_read_again(parts) - rewind_tokens - window_before
    written_over = lengths.highest - (capacity - sink)
    left_out = lengths.rings_from - window_before  # where the sequence was restored itself
    return min(max(sink, wanted, written_over, left_out), lengths.logical)


def _tokens_to_read_again(parts: SavedParts) -> int:
    """Return how many of the last tokens the next eviction may need to read again, for their queries."""
    lengths = parts.lengths
    oldest_query = max(0, lengths.logical + 1 - parts.capture_rows)
    if not parts.capture_rows or lengths.captured_from <= oldest_query:
        return 0
    return lengths.logical - max(oldest_query, lengths.evicted_at)


def _cache_tensors(parts: SavedParts, firsts: dict[int, int]) -> Iterator[Tensor]:
    """Describe the states of all layers."""
    for index, first in firsts.items():
        view = parts.caches.view(index, parts.lengths)
        for saved in kind_of(view.layer).save(view, first):
            yield Tensor(
                name=saved.name,
                element_type=element_type(saved.dtype).safetensors,
                shape=saved.shape,
                parts=lambda saved=saved: saved.parts,  # type: ignore[misc]  # bound now, called later
            )


def _capture_tensors(parts: SavedParts) -> Iterator[Tensor]:
    """Describe captured queries, [rows, Hq, D] in the order of their positions."""
    lengths, state = parts.lengths, parts.state
    kinds = {
        "capture": (state.captures, lengths.captured_from, lengths.logical),
        "captured_at_eviction": (state.captured_at_eviction, 0, lengths.evicted_at),
    }
    for name, (arrays, first, end) in kinds.items():
        for index, array in arrays.items():
            runs = capture_runs(first, end, parts.capture_rows)
            yield Tensor(
                name=f"layer.{index}.{name}",
                element_type=element_type(parts.manifest.dtype).safetensors,
                shape=(sum(count for _, count in runs), *array.shape[2:]),
                parts=lambda array=array, runs=runs: _rows(parts, array, runs),  # type: ignore[misc]
            )


def _rows(parts: SavedParts, capture: Array, runs: SlotRuns) -> Iterator[npt.NDArray[Any]]:
    buffers = parts.caches.buffers
    for begin, count in runs:
        with buffers.scope():
            rows = capture[0, begin : begin + count]
        yield buffers.download(rows)


def _kept_tensors(parts: SavedParts) -> Iterator[Tensor]:
    """Describe the positions that the last eviction kept, [Hkv, K]."""
    for index, kept in parts.lengths.kept.items():
        yield Tensor(
            name=f"layer.{index}.kept",
            element_type="I32",
            shape=kept.shape,
            parts=lambda kept=kept: [kept],  # type: ignore[misc]
        )


def _int32(values: list[int]) -> npt.NDArray[np.int32]:
    return np.fromiter(values, np.int32, len(values))
