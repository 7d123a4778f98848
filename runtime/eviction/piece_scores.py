"""Runs the graph that scores cached positions by one piece of a second reading, and keeps the largest scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortolan import contract
from ortolan.errors import OrtolanError
from ortolan.runtime.caches.captures import Captures
from ortolan.runtime.caches.layer_state import kind_of
from ortolan.runtime.caches.store import SequenceCaches
from ortolan.runtime.device.buffers import Array
from ortolan.runtime.eviction.evictor import head_lengths, turn_captures
from ortolan.runtime.state.sequence import SequenceState


class PieceScores:
    """The graph, bound to the caches of one sequence, which must not be replaced meanwhile.

    Attributes:
        scores: for each evictable layer the largest score of each position so far, [1, Hkv, C] float32.
    """

    def __init__(self, ort_session: Any, caches: SequenceCaches) -> None:
        """Bind, and begin with zeros. Raises CapacityError."""
        self._ort_session, self._io = ort_session, ort_session.io_binding()
        self._buffers = buffers = caches.buffers
        manifest = caches.store.manifest
        self._heads = {i: manifest.layers[i].num_kv_heads for i in caches.captures}
        self._wanted = {each.name for each in ort_session.get_inputs()}
        self._lengths, views = head_lengths(buffers, self._heads)
        self.scores: dict[int, Array] = {}
        for index, heads in self._heads.items():
            self.scores[index] = buffers.allocate((1, heads, caches.capacity(index)), np.float32)
            with buffers.scope():
                self.scores[index][...] = 0
            buffers.bind_in_place(self._io, contract.score(index), self.scores[index])
            self._bind(contract.kv_len(index), views[index])
            layer, tensors = manifest.layers[index], caches.store.tensors[index]
            for spec in kind_of(layer).tensors(index, layer, manifest):
                self._bind(spec.name, tensors[spec.role])
        self._tables = caches.tables()  # they outlive the binding's runs
        for name, table in self._tables.items():
            self._bind(name, table)

    def add(self, captures: Captures, state: SequenceState, written: int) -> None:
        """Score by the queries of a piece.

        Args:
            captures: the queries, [1, Wq, Hq, D] of each layer: those of the last Wq of the tokens that were written.
            state: of the sequence, which does not count these tokens.
            written: how many were written behind it.

        Raises:
            OrtolanError: ONNX Runtime failed.
        """
        lengths = state.lengths
        physical = {i: lengths.physical_of(i, count) + np.int32(written) for i, count in self._heads.items()}
        self._buffers.write(self._lengths, np.concatenate(list(physical.values()), dtype=np.int32))
        turned = turn_captures(self._buffers, captures, physical, lengths.logical + written)
        for index in self._heads:
            self._bind(contract.capture(index), turned.get(index, captures[index]))
        try:
            self._ort_session.run_with_iobinding(self._io, None)
        except Exception as error:  # the binding raises its own exception types, one per status code
            raise OrtolanError(f"the graph that scores a second reading failed: {error}") from error

    def _bind(self, name: str, array: Array) -> None:
        if name in self._wanted:
            self._buffers.bind_input(self._io, name, array)
