"""Key/value caches of attention layers: full ones, which grow with the sequence, and rings, which are written over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ortolan import contract
from ortolan.manifest import LayerInfo, Manifest
from ortolan.runtime.caches.layer_state import (
    SLOTS,
    SavedTensor,
    Sizes,
    TensorSpec,
    download,
)
from ortolan.runtime.device.buffers import Array

if TYPE_CHECKING:
    from ortolan.runtime.caches.store import StoredLayer
    from ortolan.runtime.saved.file import SessionFile

RING_TILE = 64  # slots; rings are a multiple of it, so that tiles of kernels divide them
ROLES = ("key", "value")
SCALE_ROLES = ("key_scale", "value_scale")  # of the rows, where caches hold codes
SCALE_TYPE = "float32"

SlotRuns = list[tuple[int, int]]  # (first slot, count) each


class _AttentionCache:
    """What both kinds have: rows [D] of keys and values per position and kv head."""

    needs_clear = False  # slots past a sequence's length are never read

    def clear(self, view: StoredLayer) -> None:
        """Do nothing."""

    def tensors(self, index: int, layer: LayerInfo, manifest: Manifest) -> tuple[TensorSpec, ...]:
        """Describe the pools [N, Hkv, P, D] of keys and values, and [N, Hkv, P] of scales where those are codes."""
        shape = (layer.num_kv_heads, SLOTS, layer.head_size)
        names = (contract.key_cache(index), contract.value_cache(index))
        specs = tuple(
            TensorSpec(role=role, name=name, page_shape=shape, dtype=manifest.cache_dtype)
            for role, name in zip(ROLES, names, strict=True)
        )
        if not manifest.has_code_caches:
            return specs
        names = (contract.key_scale(index), contract.value_scale(index))
        return specs + tuple(
            TensorSpec(role=role, name=name, page_shape=shape[:2], dtype=SCALE_TYPE)
            for role, name in zip(SCALE_ROLES, names, strict=True)
        )

    def snapshot(self, view: StoredLayer) -> None:
        """Return None: what steps append is forgotten by its length."""

    def restore(self, view: StoredLayer, snapshot: Mapping[str, Array] | None) -> None:
        """Do nothing."""

    def head_runs(self, view: StoredLayer, first: int) -> list[SlotRuns]:
        """List the slots to be saved of each kv head."""
        raise AssertionError("each kind has its own")

    def save(self, view: StoredLayer, first: int) -> Iterator[SavedTensor]:
        """Describe keys and values, [rows of all kv heads behind one another, D], and the scales of codes, [rows]."""
        runs = self.head_runs(view, first)
        count = sum(number for head in runs for _, number in head)
        for role in ROLES:
            yield SavedTensor(
                name=_saved_name(view, role),
                dtype=view.cache_dtype,
                shape=(count, view.layer.head_size),
                parts=_download_runs(view, role, runs),
            )
        for role in _scale_roles(view):
            yield SavedTensor(
                name=_saved_name(view, role), dtype=SCALE_TYPE, shape=(count,), parts=_download_runs(view, role, runs)
            )


class FullCache(_AttentionCache):
    """A cache of all tokens; evictions may thin it out."""

    name = "full"
    grows = True

    def slots(self, layer: LayerInfo, sizes: Sizes) -> int:
        """Return the slots of the whole context, or of what evictions leave and a chunk."""
        return max(sizes.bound or sizes.longest, sizes.sink + 1)

    def rewind_problem(self, view: StoredLayer, length: int) -> str | None:
        """Say that tokens were evicted."""
        evicted_at = view.lengths.evicted_at
        if not view.layer.evictable or length >= evicted_at:
            return None
        return (
            f"tokens before {evicted_at} were evicted from the full-attention caches; rewind to {evicted_at} or "
            "later, or to 0"
        )

    def head_runs(self, view: StoredLayer, first: int) -> list[SlotRuns]:
        """List the front of each kv head's cache, as long as it is."""
        return [[(0, int(count))] for count in view.lengths.physical_of(view.index, view.layer.num_kv_heads)]

    def load(self, view: StoredLayer, saved: SessionFile, first: int) -> None:
        """Write rows to the front of each kv head's cache."""
        begin = 0
        for head, runs in enumerate(self.head_runs(view, first)):
            for slots in runs:
                _write(view, saved, head, slots, begin)
                begin += slots[1]


class RingCache(_AttentionCache):
    """A cache of a window and the sinks; every chunk is appended before its queries attend."""

    name = "ring"
    grows = False

    def slots(self, layer: LayerInfo, sizes: Sizes) -> int:
        """Return the slots that a window and a step need: at most those of all that is written."""
        step = min(sizes.step_tokens, sizes.max_context)
        wanted = -(-(sizes.sink + layer.window + step) // RING_TILE) * RING_TILE
        return max(min(wanted, sizes.longest), sizes.sink + layer.window)

    def rewind_problem(self, view: StoredLayer, length: int) -> str | None:
        """Say that what position `length` looks back on was written over, or not saved."""
        lengths, sink = view.lengths, view.sink
        if sink < length < lengths.rings_from:
            return (
                f"the session was saved without what position {length} looks back on in layer {view.index}; rewind to "
                f"{lengths.rings_from} or later, or to 0, or save with more rewind_tokens"
            )
        if ring_keeps(length, lengths.highest, view.layer.window, view.capacity, sink):
            return None
        return (
            f"the ring of layer {view.index}, of {view.capacity} slots, has overwritten what position {length} looks "
            "back on; rewind to 0 and read the sequence again"
        )

    def head_runs(self, view: StoredLayer, first: int) -> list[SlotRuns]:
        """List the sinks, and positions `first` to the end."""
        length, sink = view.lengths.logical, view.sink
        runs = [(0, min(sink, length)), *slot_runs(max(first, sink), length, view.capacity, sink)]
        return [runs] * view.layer.num_kv_heads

    def load(self, view: StoredLayer, saved: SessionFile, first: int) -> None:
        """Write rows to their slots; a smaller ring drops the oldest positions past the sinks."""
        first = max(first, view.sink)
        dropped = max(0, view.lengths.logical - first - (view.capacity - view.sink))
        begin = 0
        for head, (sinks, *others) in enumerate(self.head_runs(view, first + dropped)):
            _write(view, saved, head, sinks, begin)
            begin += sinks[1] + dropped
            for slots in others:
                _write(view, saved, head, slots, begin)
                begin += slots[1]


def ring_keeps(length: int, highest: int, window: int, capacity: int, sink: int) -> bool:
    """Say whether a ring still holds what the query at position `length` sees before itself.

    Args:
        length: tokens that would be in the sequence.
        highest: the largest length the ring was ever written to.
        window: keys that a query sees.
        capacity: slots.
        sink: S.
    """
    oldest = max(sink, length - window + 1)
    return oldest >= length or oldest + capacity - sink >= highest


def slot_runs(begin: int, end: int, capacity: int, sink: int) -> Iterator[tuple[int, int]]:
    """Yield (first slot, count) of the contiguous slots that hold positions begin .. end, in their order.

    Source: the slot rule of the operators; all positions must be in the cache, so that no slot comes twice.
    """
    while begin < end:
        slot = begin if begin < sink else sink + (begin - sink) % (capacity - sink)
        count = min(end - begin, capacity - slot)
        yield slot, count
        begin += count


def _scale_roles(view: StoredLayer) -> tuple[str, ...]:
    return SCALE_ROLES if view.has_codes else ()


def _saved_name(view: StoredLayer, role: str) -> str:
    return f"layer.{view.index}.{role}"


def _download_runs(view: StoredLayer, role: str, runs: list[SlotRuns]) -> Iterator[npt.NDArray[Any]]:
    for head, slots in enumerate(runs):
        for begin, count in slots:
            for piece in view.pieces(role, head, begin, count):
                yield download(view.buffers, piece)


def _write(view: StoredLayer, saved: SessionFile, head: int, slots: tuple[int, int], begin: int) -> None:
    """Write rows of a file, from `begin` on, to slots (first, count) of one kv head."""
    for role in (*ROLES, *_scale_roles(view)):
        row = begin
        for piece in view.pieces(role, head, *slots):
            name, dtype = _saved_name(view, role), np.dtype(piece.dtype)
            rows = saved.read(name, dtype, row, row + len(piece), row_shape=piece.shape[1:])
            view.buffers.write(piece, rows)
            row += len(piece)
