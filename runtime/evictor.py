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
    eviction: Any  # the EvictBinding of these buffers; None: not made yet

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
    binding = bind_eviction(ort_session, caches)
    buffers = caches.buffers
    small = {
        contract.EVICT_BUDGET: options.budget,
        contract.EVICT_WINDOW: options.window,
        contract.EVICT_SINK: options.sink,
        contract.ROPE_VARIANT: variant,
    }
    arrays = {name: np.array([value], np.int64) for name, value in small.items() if name in binding.wanted}
    for name, array in arrays.items():
        binding.io.bind_ortvalue_input(name, wrap(array))
    for name, table in caches.tables_in_use().items():
        if name in binding.wanted:
            buffers.bind_input(binding.io, name, table)
    buffers.write(binding.lengths, np.concatenate([physical[index] for index in caches.captures], dtype=np.int32))
    binding.bind_captures(_turn_captures(caches, physical, logical))
    for index in caches.captures:
        binding.io.bind_output(contract.keep(index))  # anew: a bound output keeps the shape of its last run
    try:
        ort_session.run_with_iobinding(binding.io, buffers.rare_run_options())
    except Exception as error:  # the binding raises its own exception types, one per status code
        raise OrtolanError(f"the eviction graph failed: {error}") from error
    lists = binding.io.get_outputs()[-len(physical) :]  # bound last
    return {index: keep.numpy()[0].copy() for index, keep in zip(caches.captures, lists, strict=True)}


def bind_eviction(ort_session: Any, caches: EvictableCaches) -> EvictBinding:
    """Bind an eviction graph to caches, where that was not done; a device may be at work meanwhile."""
    if caches.eviction is None:
        caches.eviction = EvictBinding(ort_session, caches)
    result: EvictBinding = caches.eviction
    return result


class EvictBinding:
    """An eviction graph bound to what stays from one eviction to the next, as long as no cache is replaced.

    Attributes:
        io: the binding of caches, captures and lengths.
        wanted: the graph's inputs.
        lengths: of each kv head of each evictable layer, one after another, int32.
    """

    def __init__(self, ort_session: Any, caches: EvictableCaches) -> None:
        self.io: Any = ort_session.io_binding()
        self.wanted = {i.name for i in ort_session.get_inputs()}
        self._buffers, self._captures = caches.buffers, caches.captures
        self._turned: dict[int, Array] = {}  # captures bound in place of the caches' own
        heads = {index: int(caches.layers[index].key.shape[1]) for index in caches.captures}
        self.lengths: Array = self._buffers.allocate((sum(heads.values()),), np.int32)
        begin = 0
        for index, count in heads.items():
            with self._buffers.scope():
                lengths = self.lengths[begin : begin + count].reshape(1, count)
            begin += count
            self._buffers.bind_input(self.io, contract.kv_len(index), lengths)
            self._buffers.bind_input(self.io, contract.capture(index), caches.captures[index])
            self._buffers.bind_in_place(self.io, contract.key_cache(index), caches.layers[index].key)
            self._buffers.bind_in_place(self.io, contract.value_cache(index), caches.layers[index].value)

    def bind_captures(self, turned: dict[int, Array]) -> None:
        """Bind turned captures, and the caches' own where others were bound."""
        for index in {*self._turned, *turned}:
            self._buffers.bind_input(self.io, contract.capture(index), turned.get(index, self._captures[index]))
        self._turned = turned


def _turn_captures(
    caches: EvictableCaches, physical: dict[int, npt.NDArray[np.int32]], logical: int
) -> dict[int, Array]:
    """Turn captured rows, written by logical position, to where they are read, by each kv head's physical one.

    Only those that do not lie right already are in the result.
    """
    turned = {}
    with caches.buffers.scope():
        for index, lengths in physical.items():
            capture = caches.captures[index]
            rows, group = capture.shape[1], capture.shape[2] // len(lengths)
            if (lengths == logical).all() or not ((lengths - logical) % rows).any():
                continue
            turned[index] = capture.copy()
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
