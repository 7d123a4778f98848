"""Runs evict.onnx on one sequence's caches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan import contract
from ortolan.errors import OrtolanError
from ortolan.runtime.buffers import Array, wrap
from ortolan.runtime.caches import CacheBuffers
from ortolan.runtime.options import SnapKv


def evict(
    ort_session: Any,
    caches: CacheBuffers,
    options: SnapKv,
    physical: dict[int, npt.NDArray[np.int32]],
    logical: int,
    variant: int = 0,
) -> dict[int, npt.NDArray[np.int32]]:
    """Compact the full-attention caches to the budget, in place.

    Args:
        ort_session: session of the eviction graph.
        caches: whose evictable layers are changed.
        options: budget, window and sinks.
        physical: tokens in each evictable layer, per kv head [Hkv].
        logical: tokens read so far.
        variant: of RoPE, in use.

    Returns:
        For each layer, the physical positions kept, [Hkv or 1, K], ascending, -1 behind those of a head that
        keeps fewer than K.

    Raises:
        OrtolanError: ONNX Runtime failed; the caches must then be taken as lost.
    """
    binding, buffers = ort_session.io_binding(), caches.buffers
    small: dict[str, npt.NDArray[Any]] = {
        contract.EVICT_BUDGET: np.array([options.budget], np.int64),
        contract.EVICT_WINDOW: np.array([options.window], np.int64),
        contract.EVICT_SINK: np.array([options.sink], np.int64),
    }
    if contract.ROPE_VARIANT in {i.name for i in ort_session.get_inputs()}:
        small[contract.ROPE_VARIANT] = np.array([variant], np.int64)
    for name, array in small.items():
        binding.bind_ortvalue_input(name, wrap(array))
    inputs = {contract.capture(index): array for index, array in _turn_captures(caches, physical, logical).items()}
    inputs |= {contract.kv_len(index): array for index, array in _upload_lengths(caches, physical).items()}
    for name, array in inputs.items():
        buffers.bind_input(binding, name, array)
    shared = {contract.key_cache(index): caches.layers[index].key for index in physical}
    shared |= {contract.value_cache(index): caches.layers[index].value for index in physical}
    for name, cache in shared.items():
        buffers.bind_in_place(binding, name, cache)
    for index in physical:
        binding.bind_output(contract.keep(index))
    try:
        ort_session.run_with_iobinding(binding, buffers.rare_run_options())
    except Exception as error:  # the binding raises its own exception types, one per status code
        raise OrtolanError(f"the eviction graph failed: {error}") from error
    lists = binding.get_outputs()[len(shared) :]  # in the order of their binding
    return {index: keep.numpy()[0].copy() for index, keep in zip(physical, lists, strict=True)}


def _upload_lengths(caches: CacheBuffers, physical: dict[int, npt.NDArray[np.int32]]) -> dict[int, Array]:
    """Bring each layer's lengths [1, Hkv] to the device; layers of equal lengths share an array."""
    known: dict[bytes, Array] = {}
    uploaded = {}
    for index, lengths in physical.items():
        row = lengths[None].astype(np.int32)
        if row.tobytes() not in known:
            known[row.tobytes()] = caches.buffers.upload(row)
        uploaded[index] = known[row.tobytes()]
    return uploaded


def _turn_captures(caches: CacheBuffers, physical: dict[int, npt.NDArray[np.int32]], logical: int) -> dict[int, Array]:
    """Turn captured rows, written by logical position, to where they are read, by each kv head's physical one.

    Captures that lie right are not copied.
    """
    turned = {}
    with caches.buffers.scope():
        for index, lengths in physical.items():
            capture = caches.captures[index]
            rows, group = capture.shape[1], capture.shape[2] // len(lengths)
            is_right = not ((lengths - logical) % rows).any()
            turned[index] = capture if is_right else capture.copy()
            if is_right:
                continue
            for first, last in _equal_runs(lengths):
                heads = slice(first * group, last * group)
                shift = (int(lengths[first]) - logical) % rows
                turned[index][:, shift:, heads] = capture[:, : rows - shift, heads]
                turned[index][:, :shift, heads] = capture[:, rows - shift :, heads]
    return turned


def _equal_runs(lengths: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    """Split kv heads into half-open ranges of equal lengths."""
    edges = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    return list(itertools.pairwise(edges))
