"""Runs an eviction graph on one sequence's caches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan import contract
from ortolan.errors import OrtolanError
from ortolan.policies import Eviction
from ortolan.policies.eviction import CacheShape
from ortolan.runtime.caches.layer_state import kind_of
from ortolan.runtime.caches.store import SequenceCaches
from ortolan.runtime.device.buffers import Array, Buffers, wrap

NO_SCORES: Mapping[int, Array] = MappingProxyType({})
LARGE_BYTES = 64 * 2**20  # of memory besides the caches, from which it is worth the time to give it back


def evict(
    ort_session: Any,
    caches: SequenceCaches,
    options: Eviction,
    physical: dict[int, npt.NDArray[np.int32]],
    logical: int,
    variant: int = 0,
    *,
    scores: Mapping[int, Array] = NO_SCORES,
) -> dict[int, npt.NDArray[np.int32]]:
    """Compact the full-attention caches to the budget, in place.

    Args:
        ort_session: session of the eviction graph.
        caches: whose evictable layers are changed.
        options: budget, window and sinks.
        physical: tokens in each evictable layer, per kv head [Hkv].
        logical: tokens read so far.
        variant: of RoPE, in use.
        scores: of a second reading, [1, Hkv, C] of each evictable layer, for a policy that has one.

    Returns:
        For each layer, the physical positions kept, [Hkv or 1, K], ascending, -1 behind those of a head that
        keeps fewer than K. The next eviction overwrites them.

    Raises:
        OrtolanError: ONNX Runtime failed; the caches must then be taken as lost.
    """
    binding = bind_eviction(ort_session, caches, options)
    buffers = caches.buffers
    binding.bind_variant(variant)
    tables = caches.tables()
    for name, table in tables.items():
        if name in binding.wanted:
            buffers.bind_input(binding.io, name, table)
    lengths = np.concatenate([physical[index] for index in caches.captures], dtype=np.int32)
    buffers.write(binding.lengths, lengths)
    binding.bind_captures(turn_captures(buffers, caches.captures, physical, logical))
    binding.bind_scores(scores)
    try:
        return binding.run(ort_session, buffers.rare_run_options() if binding.is_large else None)
    except Exception as error:  # the binding raises its own exception types, one per status code
        raise OrtolanError(f"the eviction graph failed: {error}") from error


def bind_eviction(ort_session: Any, caches: SequenceCaches, options: Eviction) -> EvictBinding:
    """Bind an eviction graph to caches, where that was not done; a device may be at work meanwhile."""
    if caches.eviction is None or caches.eviction.generation != caches.store.generation:
        caches.eviction = EvictBinding(ort_session, caches, options)
    result: EvictBinding = caches.eviction
    return result


class EvictBinding:
    """An eviction graph bound to what stays from one eviction to the next, as long as no cache is replaced.

    Attributes:
        io: the binding of caches, captures and lengths.
        wanted: the graph's inputs.
        lengths: of each kv head of each evictable layer, one after another, int32.
        is_large: whether a run takes so much memory besides the caches that it is worth the time to give it back.
        generation: of the store's arrays.
    """

    def __init__(self, ort_session: Any, caches: SequenceCaches, options: Eviction) -> None:
        self.io: Any = ort_session.io_binding()
        self.wanted = {i.name for i in ort_session.get_inputs()}
        self.generation = caches.store.generation
        self._buffers, self._captures = caches.buffers, caches.captures
        self._turned: set[int] = set()  # layers with other captures bound in place of the caches' own
        layers = caches.store.manifest.layers
        heads = {index: layers[index].num_kv_heads for index in caches.captures}
        self.lengths, lengths = head_lengths(self._buffers, heads)
        self._numbers: dict[str, npt.NDArray[np.int64]] = {}
        self._bind_number(contract.EVICT_BUDGET, options.budget)
        self._bind_number(contract.EVICT_WINDOW, options.window)
        self._bind_number(contract.EVICT_SINK, options.sink)
        for index in heads:
            self._buffers.bind_input(self.io, contract.kv_len(index), lengths[index])
            self._buffers.bind_input(self.io, contract.capture(index), caches.captures[index])
            tensors = caches.store.tensors[index]
            for spec in kind_of(layers[index]).tensors(index, layers[index], caches.store.manifest):
                self._buffers.bind_in_place(self.io, spec.name, tensors[spec.role])
        slots = {index: caches.capacity(index) for index in caches.captures}
        self.is_large = max(options.workspace_bytes(_cache_shape(caches, i)) for i in slots) > LARGE_BYTES
        self._lists: dict[int, Array] = {}  # views of `_all_lists`; none where their lengths are not known ahead
        if not options.keeps_uneven:
            shared = options.shares_lists
            counts = {index: min(options.budget, count) for index, count in slots.items()}
            self._bind_lists({i: (1, 1 if shared else heads[i], count) for i, count in counts.items()})

    def bind_variant(self, variant: int) -> None:
        """Bind the variant of RoPE in use, where the graph asks for it."""
        self._bind_number(contract.ROPE_VARIANT, variant)

    def run(self, ort_session: Any, run_options: Any) -> dict[int, npt.NDArray[np.int32]]:
        """Run the graph; returns what it keeps of each layer, [Hkv or 1, K], in memory that the next run overwrites.

        Raises what ONNX Runtime's binding raises.
        """
        if not self._lists:
            for index in self._captures:
                self.io.bind_output(contract.keep(index))  # anew: a bound output keeps the shape of its last run
        ort_session.run_with_iobinding(self.io, run_options)
        if not self._lists:
            lists = self.io.get_outputs()[-len(self._captures) :]  # bound last
            return {index: keep.numpy()[0] for index, keep in zip(self._captures, lists, strict=True)}
        flat = self._buffers.download(self._all_lists, self._staging)
        kept, begin = {}, 0
        for index, array in self._lists.items():
            end = begin + array.size
            kept[index] = flat[begin:end].reshape(array.shape[1:])
            begin = end
        return kept

    def bind_captures(self, turned: dict[int, Array]) -> None:
        """Bind turned captures, which must outlive the run, and the caches' own where others were bound."""
        for index in self._turned | turned.keys():
            self._buffers.bind_input(self.io, contract.capture(index), turned.get(index, self._captures[index]))
        self._turned = set(turned)

    def bind_scores(self, scores: Mapping[int, Array]) -> None:
        """Bind the scores of a second reading, which must outlive the run."""
        for index, score in scores.items():
            self._buffers.bind_input(self.io, contract.score(index), score)

    def _bind_number(self, name: str, value: int) -> None:
        if name not in self.wanted or (name in self._numbers and self._numbers[name][0] == value):
            return
        self._numbers[name] = np.array([value], np.int64)  # the binding reads it where it is
        self.io.bind_ortvalue_input(name, wrap(self._numbers[name]))

    def _bind_lists(self, shapes: dict[int, tuple[int, int, int]]) -> None:
        """Let all lists be written to one array, which comes to the host in one copy."""
        sizes = {index: math.prod(shape) for index, shape in shapes.items()}
        self._all_lists: Array = self._buffers.allocate((sum(sizes.values()),), np.int32)
        self._staging = self._buffers.staging(self._all_lists.shape, np.int32)
        begin = 0
        for index, shape in shapes.items():
            with self._buffers.scope():
                self._lists[index] = self._all_lists[begin : begin + sizes[index]].reshape(shape)
            begin += sizes[index]
            self._buffers.bind_output(self.io, contract.keep(index), self._lists[index])


def _cache_shape(caches: SequenceCaches, index: int) -> CacheShape:
    layer = caches.store.manifest.layers[index]
    return CacheShape(
        slots=caches.capacity(index),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
    )


def head_lengths(buffers: Buffers, heads: Mapping[int, int]) -> tuple[Array, dict[int, Array]]:
    """Allocate one length, int32, for each kv head of each layer; returns all of them, and a view [1, Hkv] of each's.

    Raises:
        CapacityError: there is no memory.
    """
    lengths = buffers.allocate((sum(heads.values()),), np.int32)
    views, begin = {}, 0
    for index, count in heads.items():
        with buffers.scope():
            views[index] = lengths[begin : begin + count].reshape(1, count)
        begin += count
    return lengths, views


def turn_captures(
    buffers: Buffers, captures: Mapping[int, Array], physical: Mapping[int, npt.NDArray[np.int32]], logical: int
) -> dict[int, Array]:
    """Turn captured rows, written by logical position, to where they are read, by each kv head's physical one.

    Only those that do not lie right already are in the result.
    """
    turned = {}
    with buffers.scope():
        for index, lengths in physical.items():
            capture = captures[index]
            rows, group = capture.shape[1], capture.shape[2] // len(lengths)
            if not rows or (lengths == logical).all() or not ((lengths - logical) % rows).any():
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
