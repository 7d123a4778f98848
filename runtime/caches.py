"""Holds the cache buffers of one sequence, and resizes those of full-attention layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortolan import contract
from ortolan.manifest import Manifest
from ortolan.runtime.buffers import Array, Buffers
from ortolan.runtime.plan import CachePlan


@dataclass(slots=True)
class LayerCache:
    """The buffers of one layer: [1, Hkv, C, D] each, or pools of pages [N, Hkv, P, D]."""

    key: Array
    value: Array


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
        self.eviction: Any = None  # what `evict` bound to these buffers
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
    def free_bytes(self) -> int:
        """Bytes set aside for key and value caches that hold nothing now."""
        return 0

    @property
    def capture_bytes(self) -> int:
        """Bytes of the captured queries."""
        return int(sum(capture.nbytes for capture in self.captures.values()))

    def capacity(self, index: int) -> int:
        """Return the slots of one layer's cache."""
        return int(self.layers[index].key.shape[2])

    def tables(self) -> dict[str, Array]:
        """Map the graph's input names to the block tables; contiguous caches have none."""
        return {}

    def tables_in_use(self) -> dict[str, Array]:
        """Return the block tables without the columns that no layer uses now."""
        return {}

    def fit(self, slots: Mapping[int, int], held: Mapping[int, int]) -> None:
        """Make the caches of full-attention layers as large as said.

        Args:
            slots: what each full-attention layer is to have; all of them are given.
            held: rows at the front of each, which are kept; at most its slots.

        Raises:
            CapacityError: there is no memory.
        """
        for index, capacity in slots.items():
            if capacity != self.capacity(index):
                self.resize(index, capacity, held[index])

    def release(self, slots: Mapping[int, int], held: Mapping[int, int]) -> None:
        """Give back what costs nothing to give back past these slots: of contiguous caches, nothing."""

    def resize(self, index: int, capacity: int, held: int) -> None:
        """Replace one layer's buffers by others of `capacity` slots, keeping the first `held`."""
        old = self.layers[index]
        new = self._allocate(index, capacity)
        with self.buffers.scope():
            new.key[:, :, :held] = old.key[:, :, :held]
            new.value[:, :, :held] = old.value[:, :, :held]
        self.layers[index] = new
        self.generation += 1
        self.eviction = None

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
