"""Holds the cache buffers of one sequence, and resizes those of full-attention layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ortolan import contract
from ortolan.manifest import Manifest
from ortolan.runtime.buffers import Array, Buffers
from ortolan.runtime.plan import CachePlan


@dataclass(slots=True)
class LayerCache:
    """The buffers of one layer, [1, Hkv, C, D] each."""

    key: Array
    value: Array

    @property
    def capacity(self) -> int:
        """Slots of the cache."""
        return int(self.key.shape[2])


class CacheBuffers:
    """All caches of one sequence; `generation` rises whenever a buffer is replaced."""

    def __init__(
        self,
        manifest: Manifest,
        plan: CachePlan,
        capture_rows: int,
        buffers: Buffers,
        capacities: Sequence[int] | None = None,
    ) -> None:
        self._manifest = manifest
        self.buffers = buffers
        self.generation = 0
        # What is restored starts with the slots that it needs, not with the plan's.
        slots = capacities or [layer.capacity for layer in plan.layers]
        self.layers = [self._allocate(index, capacity) for index, capacity in enumerate(slots)]
        self.captures = {
            index: self._empty((1, capture_rows, manifest.num_heads, layer.head_size))
            for index, layer in enumerate(manifest.layers)
            if layer.evictable
        }

    @property
    def bytes(self) -> int:
        """Bytes that key and value caches hold now."""
        return int(sum(layer.key.nbytes + layer.value.nbytes for layer in self.layers))

    @property
    def capture_bytes(self) -> int:
        """Bytes of the captured queries."""
        return int(sum(capture.nbytes for capture in self.captures.values()))

    def resize(self, index: int, capacity: int, held: int) -> None:
        """Replace one layer's buffers by others of `capacity` slots, keeping the first `held`."""
        old = self.layers[index]
        new = self._allocate(index, capacity)
        with self.buffers.scope():
            new.key[:, :, :held] = old.key[:, :, :held]
            new.value[:, :, :held] = old.value[:, :, :held]
        self.layers[index] = new
        self.generation += 1

    def copy_captures(self) -> dict[int, Array]:
        """Copy the captured queries of all layers."""
        with self.buffers.scope():
            return {index: capture.copy() for index, capture in self.captures.items()}

    def restore_captures(self, copies: dict[int, Array]) -> None:
        """Put copied queries back."""
        with self.buffers.scope():
            for index, capture in copies.items():
                self.captures[index][:] = capture

    def named(self) -> dict[str, Array]:
        """Map the graph's input names to the buffers; each output is bound to the same one."""
        buffers: dict[str, Array] = {}
        for index, layer in enumerate(self.layers):
            buffers[contract.key_cache(index)] = layer.key
            buffers[contract.value_cache(index)] = layer.value
        return buffers | {contract.capture(index): capture for index, capture in self.captures.items()}

    def blocks(self, index: int, head: int, begin: int, count: int) -> Iterator[tuple[Array, Array]]:
        """Yield the keys and values of slots begin .. begin + count of one kv head, in contiguous blocks [n, D]."""
        layer = self.layers[index]
        with self.buffers.scope():
            rows = slice(begin, begin + count)
            block = layer.key[0, head, rows], layer.value[0, head, rows]
        if count:
            yield block

    def _allocate(self, index: int, capacity: int) -> LayerCache:
        layer = self._manifest.layers[index]
        shape = (1, layer.num_kv_heads, capacity, layer.head_size)
        return LayerCache(self._empty(shape), self._empty(shape))

    def _empty(self, shape: tuple[int, ...]) -> Array:
        return self.buffers.empty(shape, self._manifest.dtype)
