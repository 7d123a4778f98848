"""The recurrent state of a gated delta network, with the updates of the last tokens, which can be taken back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ortolan import contract
from ortolan.contract import RECENT_TOKENS
from ortolan.manifest import LayerInfo, Manifest
from ortolan.runtime.caches.layer_state import SavedTensor, Sizes, TensorSpec, download
from ortolan.runtime.device.buffers import Array

if TYPE_CHECKING:
    from ortolan.runtime.caches.store import StoredLayer
    from ortolan.runtime.saved.file import SessionFile


class GatedDeltaState:
    """One block for each sequence, whatever its length.

    The operators keep the state as it was some tokens ago, and the updates since then. So a sequence goes back by its
    length, as far as those reach: RECENT_TOKENS tokens before the last one that was written, and not into a chunk of
    more tokens.
    """

    name = "gated_delta"
    grows = False
    needs_clear = True  # files hold all of it, and what no step has written yet may be anything

    def tensors(self, index: int, layer: LayerInfo, manifest: Manifest) -> tuple[TensorSpec, ...]:
        """Describe the tensors of the operators GatedDeltaRule and CausalConv."""
        key, value = (layer.num_kv_heads, layer.head_size), (layer.num_heads, layer.value_size)
        features = 2 * key[0] * key[1] + value[0] * value[1]
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "state": ((value[0], key[1], value[1]), "float32"),
            "recent_keys": ((RECENT_TOKENS, *key), "float32"),
            "recent_updates": ((RECENT_TOKENS, *value), "float32"),
            "recent_decays": ((RECENT_TOKENS, value[0]), "float32"),
            "state_len": ((), "int32"),
            "conv_state": ((RECENT_TOKENS + layer.conv_taps - 1, features), manifest.dtype),
        }
        return tuple(
            TensorSpec(role=role, name=contract.layer_state(index, role), page_shape=shape, dtype=dtype)
            for role, (shape, dtype) in shapes.items()
        )

    def slots(self, layer: LayerInfo, sizes: Sizes) -> int:
        """Return 1: there are no positions."""
        return 1

    def clear(self, view: StoredLayer) -> None:
        """Write zeros."""
        for spec in self._specs(view):
            block = view.block(spec.role)
            with view.buffers.scope():
                block[...] = 0
        view.lengths.states_from = 0

    def rewind_problem(self, view: StoredLayer, length: int) -> str | None:
        """Say that the state has read more tokens than that."""
        first = view.lengths.states_from
        if length >= first or length == 0:
            return None
        return (
            f"the recurrent state of layer {view.index} goes back {RECENT_TOKENS} tokens at most, and not into a chunk "
            f"of more; rewind to {first} or later, or to 0"
        )

    def snapshot(self, view: StoredLayer) -> Mapping[str, Array]:
        """Copy all tensors: a chunk of more than RECENT_TOKENS tokens moves them for good."""
        with view.buffers.scope():
            return {spec.role: view.block(spec.role).copy() for spec in self._specs(view)}

    def restore(self, view: StoredLayer, snapshot: Mapping[str, Array] | None) -> None:
        """Write all tensors."""
        with view.buffers.scope():
            for role, copied in (snapshot or {}).items():
                view.block(role)[...] = copied

    def save(self, view: StoredLayer, first: int) -> Iterator[SavedTensor]:
        """Describe all tensors."""
        for spec in self._specs(view):
            block = view.block(spec.role)
            yield SavedTensor(
                name=spec.name,
                dtype=spec.dtype,
                shape=spec.page_shape or (1,),
                parts=iter([download(view.buffers, block).reshape(spec.page_shape or (1,))]),
            )

    def load(self, view: StoredLayer, saved: SessionFile, first: int) -> None:
        """Write all tensors."""
        for spec in self._specs(view):
            block = view.block(spec.role)
            with view.buffers.scope():
                flat = block.reshape(-1)
            view.buffers.write(flat, saved.read(spec.name, np.dtype(block.dtype)).reshape(-1))

    def _specs(self, view: StoredLayer) -> tuple[TensorSpec, ...]:
        return self.tensors(view.index, view.layer, view.manifest)
