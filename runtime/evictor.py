"""Runs evict.onnx on one sequence's caches."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ortolan import contract
from ortolan.errors import OrtolanError
from ortolan.runtime.buffers import Array, Buffers, wrap
from ortolan.runtime.options import SnapKv


class EvictableCaches(Protocol):
    """The caches of one sequence."""

    buffers: Buffers
    layers: Any  # of LayerCache, by the index of the layer
    captures: dict[int, Array]  # [1, Wq, Hq, D] of each evictable layer

    def tables_in_use(self) -> dict[str, Array]:
        """Map the graph's input names to block tables, [1, pages in use]; empty where caches are contiguous."""


def evict(
    ort_session: Any,
    caches: EvictableCaches,
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
    small |= {contract.kv_len(index): lengths[None].astype(np.int32) for index, lengths in physical.items()}
    if contract.ROPE_VARIANT in {i.name for i in ort_session.get_inputs()}:
        small[contract.ROPE_VARIANT] = np.array([variant], np.int64)
    for name, array in small.items():
        binding.bind_ortvalue_input(name, wrap(array))
    turned = _turn_captures(caches, physical, logical)
    for index, capture in turned.items():
        buffers.bind_input(binding, contract.capture(index), capture)
    shared = {contract.key_cache(index): caches.layers[index].key for index in physical}
    shared |= {contract.value_cache(index): caches.layers[index].value for index in physical}
    for name, cache in shared.items():
        buffers.bind_in_place(binding, name, cache)
    wanted = {i.name for i in ort_session.get_inputs()}
    for name, table in caches.tables_in_use().items():
        if name in wanted:
            buffers.bind_input(binding, name, table)
    for index in physical:
        binding.bind_output(contract.keep(index))
        binding.bind_output(contract.output(contract.kv_len(index)))
    try:
        ort_session.run_with_iobinding(binding, buffers.rare_run_options())
    except Exception as error:  # the binding raises its own exception types, one per status code
        raise OrtolanError(f"the eviction graph failed: {error}") from error
    results = dict(zip(_names(shared, physical), binding.get_outputs(), strict=True))
    return {index: results[contract.keep(index)].numpy()[0].copy() for index in physical}


def _turn_captures(
    caches: EvictableCaches, physical: dict[int, npt.NDArray[np.int32]], logical: int
) -> dict[int, Array]:
    """Turn captured rows, written by logical position, to where they are read, by each kv head's physical one."""
    turned = {}
    with caches.buffers.scope():
        for index, lengths in physical.items():
            capture = caches.captures[index]
            turned[index] = capture.copy()
            rows, group = capture.shape[1], capture.shape[2] // len(lengths)
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


def _names(shared: dict[str, Any], physical: dict[int, Any]) -> list[str]:
    """List the bound outputs in the order of their binding."""
    names = [contract.output(name) for name in shared]
    for index in physical:
        names += [contract.keep(index), contract.output(contract.kv_len(index))]
    return names
