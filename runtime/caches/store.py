"""Holds the memory of layers' states: pools of pages, of which a contiguous cache is a single one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import CapacityError
from ortolan.manifest import CacheKind, LayerInfo, Manifest
from ortolan.runtime.caches.captures import Captures
from ortolan.runtime.caches.layer_state import SLOTS, TensorSpec, kind_of, own_layers
from ortolan.runtime.caches.plan import CachePlan
from ortolan.runtime.device.buffers import Array, Buffers
from ortolan.runtime.state.lengths import Lengths

Snapshot = dict[int, Mapping[str, Array] | None]  # of each layer; None: its lengths are enough


@dataclass(slots=True)
class Block:
    """One piece of memory for tensors of one shape, which is quicker to make, to copy and to free than many.

    Attributes:
        members: layer and role of the tensors in it, in their order.
        spec: what all of them are like.
        array: [n, N, ...].
    """

    members: tuple[tuple[int, str], ...]
    spec: TensorSpec
    array: Array

    @property
    def slot_axis(self) -> int:
        """The axis of a page's slots in one tensor [N, ...]."""
        return 1 + self.spec.page_shape.index(SLOTS)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one tensor."""
        tensors, pages = self.array.shape[:2]
        return int(self.array.nbytes // (tensors * pages))


class CacheStore:
    """The states of all layers; `generation` rises whenever an array is replaced.

    Attributes:
        tensors: for each layer that has a state of its own, its arrays [N, ...] by role.
        grows: for each of them, whether a sequence takes more slots as it gets longer.
        growing_sizes: slots of a page of the layers that grow, each with its kind, None where caches are contiguous.
    """

    def __init__(
        self, manifest: Manifest, plan: CachePlan, buffers: Buffers, capacities: Sequence[int] | None = None
    ) -> None:
        """Allocate; `capacities` are the slots of each layer's contiguous cache where they are not the plan's."""
        self.manifest, self.plan, self.buffers = manifest, plan, buffers
        self.generation = 0
        self.tensors: dict[int, dict[str, Array]] = {}
        self._kinds: dict[int, CacheKind] = {i: kind for kind in manifest.cache_kinds for i in kind.layers}
        self._pages = {kind.name: kind.num_pages for kind in plan.kinds}
        layers = own_layers(manifest)
        self._specs = {i: kind_of(manifest.layers[i]).tensors(i, manifest.layers[i], manifest) for i in layers}
        self.grows = {i: kind_of(manifest.layers[i]).grows for i in layers}
        slots = dict(enumerate(capacities or [layer.capacity for layer in plan.layers]))
        self._blocks = self._allocate({i: manifest.page_size or slots[i] for i in layers})
        self._name_tensors()

    @property
    def bytes(self) -> int:
        """Bytes of all arrays."""
        return int(sum(block.array.nbytes for block in self._blocks))

    def kind(self, index: int) -> CacheKind | None:
        """Return the kind whose pages a layer's state lies in; None where caches are contiguous."""
        return self._kinds.get(index)

    def page_slots(self, index: int) -> int:
        """Return the slots of a page of one layer's state; 1 where it has none."""
        return self._page_slots[index]

    def named(self) -> dict[str, Array]:
        """Map the graph's input names to the arrays; each output is bound to the same one."""
        return {
            spec.name: self.tensors[index][spec.role] for index in sorted(self.tensors) for spec in self._specs[index]
        }

    def resize(self, slots: Mapping[int, int], held: Mapping[int, int]) -> None:
        """Give contiguous caches other numbers of slots; the rows at their front are kept.

        Args:
            slots: of each layer that grows.
            held: rows at the front of each, which are kept; at most its slots.

        Raises:
            CapacityError: there is no memory; nothing changed that was not made larger before.
        """
        changed = {i for i, count in slots.items() if count != self.page_slots(i)}
        old = [block for block in self._blocks if changed & {i for i, _ in block.members}]
        if not old:
            return
        members = sorted({i for block in old for i, _ in block.members})
        new = self._allocate({i: slots.get(i, self.page_slots(i)) for i in members})
        with self.buffers.scope():
            if len(old) == len(new) == 1:
                _copy_front(new[0].array, old[0].array, old[0].slot_axis + 1, max(held[i] for i in members))
            else:
                for block in new:
                    for place, (index, role) in enumerate(block.members):
                        source = self.tensors[index][role]
                        _copy_front(block.array[place], source, block.slot_axis, held[index])
        self._blocks = [block for block in self._blocks if not any(block is each for each in old)] + new
        self._name_tensors()
        self.generation += 1

    def make_captures(self, rows: int, sequences: int = 1) -> Captures:
        """Allocate what takes the last `rows` queries of evictable layers, [sequences, rows, Hq, D] each."""
        sizes: dict[tuple[int, int], list[int]] = {}
        for index, layer in enumerate(self.manifest.layers):
            if layer.evictable:
                sizes.setdefault((layer.num_heads, layer.head_size), []).append(index)
        blocks = [
            (tuple(members), self.buffers.empty((len(members), sequences, rows, heads, size), self.manifest.dtype))
            for (heads, size), members in sizes.items()
        ]
        with self.buffers.scope():
            return Captures(blocks)

    def page_bytes(self, kind: str) -> int:
        """Return the bytes of a page of a kind, in all its layers."""
        return sum(len(places) * block.page_bytes for block, places in self._blocks_of(kind))

    def read_pages(self, kind: str, pages: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Copy what pages of a kind hold, in all its layers, to the host: [pages, bytes of a page]."""
        parts = []
        for block, places in self._blocks_of(kind):
            with self.buffers.scope():
                part = block.array[_grid(places, pages)]
            rows = np.moveaxis(self.buffers.download(part), 1, 0)
            parts.append(np.ascontiguousarray(rows).reshape(len(pages), -1).view(np.uint8))
        return np.concatenate(parts, axis=1)

    def write_pages(self, kind: str, pages: Sequence[int], contents: npt.NDArray[np.uint8]) -> None:
        """Give pages of a kind what `read_pages` has copied from as many."""
        begin = 0
        for block, places in self._blocks_of(kind):
            shape, dtype = block.array.shape[2:], np.dtype(block.array.dtype)
            end = begin + len(places) * block.page_bytes
            rows = np.ascontiguousarray(contents[:, begin:end]).view(dtype).reshape(len(pages), len(places), *shape)
            part = self.buffers.allocate((len(places), len(pages), *shape), dtype)
            self.buffers.write(part, np.ascontiguousarray(np.moveaxis(rows, 0, 1)))
            with self.buffers.scope():
                block.array[_grid(places, pages)] = part
            begin = end

    def _blocks_of(self, kind: str) -> Iterator[tuple[Block, list[int]]]:
        """Yield the blocks with tensors of a kind, and the places of these in each."""
        for block in self._blocks:
            places = [i for i, (index, _) in enumerate(block.members) if self._kinds[index].name == kind]
            if places:
                yield block, places

    def clear(self) -> None:
        """Let all arrays go."""
        self.tensors.clear()
        self._blocks.clear()

    def _allocate(self, slots: Mapping[int, int]) -> list[Block]:
        """Allocate in as few blocks as shapes allow; what grows lies apart from what does not."""
        groups: dict[Any, list[tuple[int, TensorSpec]]] = {}
        for index, count in slots.items():
            grows, kind = self.grows[index], self._kinds.get(index)
            pages = self._pages[kind.name] if kind else 1
            for spec in self._specs[index]:
                key = (grows, spec.shape(pages, count), spec.page_shape, spec.dtype)
                groups.setdefault(key, []).append((index, spec))
        try:
            return [
                Block(
                    tuple((index, spec.role) for index, spec in members),
                    members[0][1],
                    self.buffers.empty((len(members), *shape), dtype),
                )
                for (_, shape, _, dtype), members in groups.items()
            ]
        except CapacityError as error:
            raise CapacityError(
                f"there is no memory for the caches of max_context {self.plan.max_context}, {self.plan.bytes} bytes in "
                f"all: {error}; lower max_context (--max-context), or evict while the prompt is read (during_prefill)"
            ) from error

    def _name_tensors(self) -> None:
        self.tensors.clear()
        with self.buffers.scope():
            for block in self._blocks:
                for place, (index, role) in enumerate(block.members):
                    self.tensors.setdefault(index, {})[role] = block.array[place]
        self._page_slots = dict.fromkeys(self.tensors, 1)
        for block in self._blocks:
            if SLOTS in block.spec.page_shape:
                slots = int(block.array.shape[1 + block.slot_axis])
                self._page_slots |= {index: slots for index, _ in block.members}
        growing = [index for index in self.tensors if self.grows[index]]
        self.growing_sizes = {(kind.name if (kind := self.kind(i)) else None, self.page_slots(i)) for i in growing}


class SequenceCaches:
    """One sequence's part of a store.

    Attributes:
        captures: its captured queries, [1, Wq, Hq, D] of each evictable layer.
        eviction: what an eviction bound to these arrays; None: nothing yet.
    """

    def __init__(self, store: CacheStore, pages: Mapping[str, Sequence[int]], captures: Captures | None = None) -> None:
        """Take the sequence's pages of each kind, in the order of their slots; the mapping is read when it is used."""
        self.store, self.pages = store, pages
        self.buffers = store.buffers
        self.captures = Captures() if captures is None else captures
        self.eviction: Any = None
        layers = store.manifest.layers
        self._stateful = [i for i in store.tensors if kind_of(layers[i]).needs_clear]

    def page_numbers(self, index: int) -> Sequence[int]:
        """Return the pages of one layer's state."""
        kind = self.store.kind(index)
        return self.pages[kind.name] if kind else (0,)

    def capacity(self, index: int) -> int:
        """Return the slots that one layer has now; where they are written over, all of them, with pages or without."""
        if not self.store.grows[index]:
            return self.store.plan.layers[index].capacity
        return len(self.page_numbers(index)) * self.store.page_slots(index)

    def least_capacity(self) -> int:
        """Return the fewest slots that a layer has now, of those that grow; at least one does."""
        return min(slots if name is None else slots * len(self.pages[name]) for name, slots in self.store.growing_sizes)

    def tables(self) -> dict[str, Array]:
        """Make the block tables, [1, pages in use] int32, by the graph's input names; contiguous caches have none."""
        tables = {}
        for kind in self.store.manifest.cache_kinds:
            row = np.array([self.pages[kind.name]], np.int32)
            tables[kind.block_table] = self.buffers.allocate(row.shape, np.int32)
            self.buffers.write(tables[kind.block_table], row)
        return tables

    def clear(self, lengths: Lengths) -> None:
        """Make the states that need it those of a sequence without tokens."""
        for index in self._stateful:
            kind_of(self.store.manifest.layers[index]).clear(self.view(index, lengths))

    def snapshot(self, lengths: Lengths) -> Snapshot:
        """Copy what steps change beyond the lengths."""
        layers = self.store.manifest.layers
        return {i: kind_of(layers[i]).snapshot(self.view(i, lengths)) for i in self.store.tensors}

    def restore(self, snapshot: Snapshot, lengths: Lengths) -> None:
        """Put a snapshot back."""
        for index, copies in snapshot.items():
            kind_of(self.store.manifest.layers[index]).restore(self.view(index, lengths), copies)

    def copy_from(self, other: SequenceCaches) -> None:
        """Take over the contents of another sequence's pages, which are as many and as large as this one's.

        Kinds that this one has no pages of stay out of it.
        """
        with self.buffers.scope():
            for index, tensors in self.store.tensors.items():
                kind = self.store.kind(index)
                if kind is not None and kind.name not in self.pages:
                    continue
                mine, others = list(self.page_numbers(index)), list(other.page_numbers(index))
                for role, array in tensors.items():
                    array[mine] = other.store.tensors[index][role][others]
            for index, capture in self.captures.items():
                capture[...] = other.captures[index]

    def view(self, index: int, lengths: Lengths) -> StoredLayer:
        """Return one layer's state of a sequence of these lengths."""
        return StoredLayer(self, index, lengths)


class StoredLayer:
    """One layer's state of one sequence in a store.

    Attributes:
        index, layer: which.
        manifest: of the model.
        lengths: of the sequence.
        capacity: slots.
    """

    def __init__(self, caches: SequenceCaches, index: int, lengths: Lengths) -> None:
        self.index, self.lengths = index, lengths
        self.manifest = manifest = caches.store.manifest
        self.layer: LayerInfo = manifest.layers[index]
        self.sink = manifest.sink
        self.cache_dtype, self.has_codes = manifest.cache_dtype, manifest.has_code_caches
        self.buffers = caches.buffers
        self.capacity = caches.capacity(index)
        self._caches = caches

    def pieces(self, role: str, head: int, begin: int, count: int) -> Iterator[Array]:
        """Yield slots begin .. begin + count of one kv head, [n, ...], at most a page at a time."""
        store, end = self._caches.store, begin + count
        array, pages = store.tensors[self.index][role], self._caches.page_numbers(self.index)
        size = store.page_slots(self.index)
        while begin < end:
            row = begin % size
            rows = slice(row, min(size, row + end - begin))
            with self.buffers.scope():
                piece = array[pages[begin // size], head, rows]
            yield piece
            begin += rows.stop - rows.start

    def block(self, role: str) -> Array:
        """Return the sequence's page of a tensor that has no slots."""
        with self.buffers.scope():
            return self._caches.store.tensors[self.index][role][self._caches.page_numbers(self.index)[0], ...]


def _grid(places: Sequence[int], pages: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the index of some pages of some tensors of a block, [places, pages, ...]; devices take lists, too."""
    return [[place] for place in places], [list(pages)]


def _copy_front(target: Array, source: Array, axis: int, rows: int) -> None:
    """Copy the first rows along an axis; as words of 8 bytes where rows are whole ones, which devices copy faster."""
    front = (slice(None),) * axis + (slice(rows),)
    if axis < source.ndim - 1 and source.shape[-1] * source.dtype.itemsize % 8 == 0:
        target, source = target.view(np.uint64), source.view(np.uint64)
    target[front] = source[front]
