"""Holds the cache buffers of one sequence, and resizes those of full-attention layers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortolan import contract
from ortolan.errors import CapacityError
from ortolan.manifest import Manifest
from ortolan.runtime.buffers import Array, Buffers
from ortolan.runtime.plan import CachePlan


@dataclass(slots=True)
class LayerCache:
    """The buffers of one layer: [1, Hkv, C, D] each, or pools of pages [N, Hkv, P, D]."""

    key: Array
    value: Array


@dataclass(slots=True)
class Block:
    """One piece of memory for buffers of one shape [...], which is quicker to make, to copy and to free than many.

    Attributes:
        members: the layers whose buffers lie in it, in their order.
        array: [n, ...]; n is the number of members, or twice that where each has keys and values.
    """

    members: tuple[int, ...]
    array: Array

    def caches(self) -> Iterator[tuple[int, LayerCache]]:
        """Yield each member's keys and values."""
        for place, index in enumerate(self.members):
            yield index, LayerCache(self.array[2 * place], self.array[2 * place + 1])


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
        self._blocks = self._allocate(dict(enumerate(slots)))
        self.layers = self._name_layers()
        self._capture_blocks = self._allocate_captures(capture_rows)
        self.captures = _named(self._capture_blocks)

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
        for block in list(self._blocks):
            wanted = {i: slots.get(i, self.capacity(i)) for i in block.members}
            if any(capacity != self.capacity(i) for i, capacity in wanted.items()):
                self._replace(block, wanted, held)

    def shrink(self, slots: Mapping[int, int], held: Mapping[int, int]) -> None:
        """Make caches smaller, as `fit` does; where there is no memory for both old and new ones, the old ones stay."""
        with suppress(CapacityError):
            self.fit(slots, held)

    def release(self, slots: Mapping[int, int], held: Mapping[int, int]) -> None:
        """Give back what costs nothing to give back past these slots: of contiguous caches, nothing."""

    def copy_captures(self) -> dict[int, Array]:
        """Copy the captured queries of all layers."""
        with self.buffers.scope():
            return _named([Block(block.members, block.array.copy()) for block in self._capture_blocks])

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

    def _shape(self, index: int, capacity: int) -> tuple[int, ...]:
        """Return the shape of one layer's keys, or values."""
        layer = self._manifest.layers[index]
        return 1, layer.num_kv_heads, capacity, layer.head_size

    def _allocate(self, capacities: Mapping[int, int]) -> list[Block]:
        """Allocate caches in as few blocks as their shapes allow; rings, which stay, apart from the others."""
        kinds = {i: (self._manifest.layers[i].window > 0, self._shape(i, n)) for i, n in capacities.items()}
        return [self._block(members, 2, self._shape(i, capacities[i])) for i, members in _alike(kinds)]

    def _allocate_captures(self, rows: int) -> list[Block]:
        layers = {i: layer for i, layer in enumerate(self._manifest.layers) if layer.evictable}
        sizes = {i: (layer.num_heads, layer.head_size) for i, layer in layers.items()}
        return [self._block(members, 1, (1, rows, *sizes[i])) for i, members in _alike(sizes)]

    def _block(self, members: tuple[int, ...], each: int, shape: tuple[int, ...]) -> Block:
        return Block(members, self.buffers.empty((each * len(members), *shape), self._manifest.dtype))

    def _name_layers(self) -> list[LayerCache]:
        """Return the buffers that the blocks hold, by the index of the layer."""
        with self.buffers.scope():
            found = dict(cache for block in self._blocks for cache in block.caches())
        return [found[index] for index in range(len(found))]

    def _replace(self, old: Block, capacities: Mapping[int, int], held: Mapping[int, int]) -> None:
        """Put blocks of other capacities in one's place, keeping the first `held` rows of each member."""
        new = self._allocate(capacities)
        with self.buffers.scope():
            if len(new) == 1:
                rows = max(held[index] for index in old.members)
                _words(new[0].array)[..., :rows, :] = _words(old.array)[..., :rows, :]
            else:
                for index, layer in (cache for block in new for cache in block.caches()):
                    for target, source in zip(_parts(layer), _parts(self.layers[index]), strict=True):
                        _words(target)[:, :, : held[index]] = _words(source)[:, :, : held[index]]
        self._blocks.remove(old)
        self._blocks += new
        self.layers = self._name_layers()
        self.generation += 1
        self.eviction = None


def _alike(kinds: Mapping[int, Hashable]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the layers of each kind, and the first of them."""
    groups: dict[Hashable, list[int]] = {}
    for index, kind in kinds.items():
        groups.setdefault(kind, []).append(index)
    for members in groups.values():
        yield members[0], tuple(members)


def _parts(layer: LayerCache) -> tuple[Array, Array]:
    return layer.key, layer.value


def _words(array: Array) -> Array:
    """View rows [..., D], D a multiple of 8, as words of 8 bytes, which a device copies faster than narrow elements."""
    return array.view(np.uint64)


def _named(blocks: Sequence[Block]) -> dict[int, Array]:
    """Map layers to their buffers, one each, in the order of layers."""
    return dict(sorted((index, block.array[place]) for block in blocks for place, index in enumerate(block.members)))
