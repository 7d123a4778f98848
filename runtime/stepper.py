"""Runs the decoder graph on one sequence's caches, with bindings that are made once and reused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortolan import contract
from ortolan.errors import OrtolanError
from ortolan.manifest import Manifest
from ortolan.runtime.buffers import wrap
from ortolan.runtime.caches import CacheBuffers

Logits: TypeAlias = npt.NDArray[np.float32]


@dataclass(slots=True)
class _Bound:
    """A binding for steps of one number of tokens, with the host arrays that it reads."""

    binding: Any
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    rope_variant: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]


class Stepper:
    """Feeds tokens of one sequence to the decoder graph."""

    def __init__(self, ort_session: Any, manifest: Manifest, caches: CacheBuffers) -> None:
        self._session = ort_session
        self._caches = caches
        self._generation = caches.generation
        self._bound: dict[int, _Bound] = {}
        self._logits = np.empty((1, manifest.vocab_size), np.float32)
        self._past_len = np.zeros(1, np.int32)
        self._kv_len = {
            index: np.zeros((1, layer.num_kv_heads), np.int32)
            for index, layer in enumerate(manifest.layers)
            if layer.evictable
        }
        self._inputs = {i.name for i in ort_session.get_inputs()}

    @property
    def bytes(self) -> int:
        """Bytes of the arrays that steps read and write besides the caches."""
        arrays: list[npt.NDArray[Any]] = [self._logits, self._past_len, *self._kv_len.values()]
        for bound in self._bound.values():
            arrays += [bound.token_ids, bound.positions, bound.rope_variant, bound.query_start]
        return sum(array.nbytes for array in arrays)

    def run(
        self,
        tokens: npt.NDArray[np.int64],
        logical: int,
        physical: dict[int, npt.NDArray[np.int32]],
        variant: int,
    ) -> Logits:
        """Feed tokens [T] at positions logical .. logical + T; returns logits [V], valid until the next run.

        Raises:
            OrtolanError: ONNX Runtime failed.
        """
        bound = self._binding(len(tokens))
        bound.token_ids[:] = tokens
        bound.positions[:] = np.arange(logical, logical + len(tokens))
        bound.rope_variant[:] = variant
        self._past_len[0] = logical
        for index, lengths in physical.items():
            self._kv_len[index][0] = lengths
        try:
            self._session.run_with_iobinding(bound.binding)
        except Exception as error:  # the binding raises its own exception types, one per status code
            raise OrtolanError(f"the decoder graph failed: {error}") from error
        row: Logits = self._logits[0]
        return row

    def _binding(self, count: int) -> _Bound:
        """Return the binding for `count` tokens; besides decode's, only the last one is kept."""
        if self._generation != self._caches.generation:
            self._bound.clear()
            self._generation = self._caches.generation
        if count not in self._bound:
            self._bound = {k: v for k, v in self._bound.items() if k == 1}
            self._bound[count] = self._bind(count)
        return self._bound[count]

    def _bind(self, count: int) -> _Bound:
        binding = self._session.io_binding()
        bound = _Bound(
            binding=binding,
            token_ids=np.zeros(count, np.int64),
            positions=np.zeros(count, np.int64),
            rope_variant=np.zeros(count, np.int64),
            query_start=np.array([0, count], np.int32),
        )
        inputs: dict[str, npt.NDArray[Any]] = {
            contract.TOKEN_IDS: bound.token_ids,
            contract.POSITIONS: bound.positions,
            contract.ROPE_VARIANT: bound.rope_variant,
            contract.QUERY_START: bound.query_start,
            contract.PAST_LEN: self._past_len,
            contract.LOGIT_ROWS: np.array([count - 1], np.int64),
            **{contract.kv_len(index): lengths for index, lengths in self._kv_len.items()},
        }
        for name, array in inputs.items():
            if name in self._inputs:
                binding.bind_ortvalue_input(name, wrap(array))
        for name, array in self._caches.named().items():
            self._caches.buffers.bind_in_place(binding, name, array)
        for name, table in self._caches.tables().items():
            self._caches.buffers.bind_input(binding, name, table)
        binding.bind_ortvalue_output(contract.LOGITS, wrap(self._logits))
        return bound
