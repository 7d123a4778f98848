"""Holds the caches of one sequence in pages: pools as large as the plan, and the pages of them that it uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ortolan.errors import CapacityError
from ortolan.manifest import CacheKind, Manifest
from ortolan.runtime.buffers import Array, Buffers
from ortolan.runtime.caches import CacheBuffers
from ortolan.runtime.plan import CachePlan

NO_PAGE = -1  # in a table's entries past the pages in use, which are never followed


class PageTable:
    """The pages that one sequence has of one kind of caches, in the order of its slots.

    Every page of the pool is either free or in the table, once.
    """

    def __init__(self, num_pages: int, buffers: Buffers) -> None:
        self._buffers = buffers
        self._free = list(range(num_pages - 1, -1, -1))  # the next one to take is the last
        self._pages: list[int] = []
        self.array: Array = buffers.allocate((1, num_pages), np.int32)  # [1, M]
        self._write()

    @property
    def used(self) -> int:
        """Pages in the table."""
        return len(self._pages)

    @property
    def pages(self) -> tuple[int, ...]:
        """Numbers of the pages in the table, in the order of slots."""
        return tuple(self._pages)

    @property
    def free(self) -> int:
        """Pages of the pool that hold nothing."""
        return len(self._free)

    def resize(self, num_pages: int) -> None:
        """Take or free pages at the table's end.

        Raises:
            CapacityError: the pool has fewer; nothing changed.
        """
        if num_pages == self.used:
            return
        if num_pages > self.used + self.free:
            raise CapacityError(
                f"{num_pages} pages are needed, the pool has {self.used + self.free}; make the session with a larger "
                "max_context"
            )
        while self.used < num_pages:
            self._pages.append(self._free.pop())
        while self.used > num_pages:
            self._free.append(self._pages.pop())
        self._write()

    def _write(self) -> None:
        row = np.full(self.array.shape, NO_PAGE, np.int32)
        row[0, : self.used] = self._pages
        self._buffers.write(self.array, row)


class PagedCaches(CacheBuffers):
    """All caches of one sequence, in pages. Full-attention layers grow and shrink by pages; rings keep theirs.

    No buffer is ever replaced: a change of pages changes the tables that bindings already read.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: CachePlan,
        capture_rows: int,
        buffers: Buffers,
        capacities: Sequence[int] | None = None,
    ) -> None:
        self._page_size = manifest.page_size
        self._kinds: dict[int, CacheKind] = {i: kind for kind in manifest.cache_kinds for i in kind.layers}
        self._tables = {
            kind.name: PageTable(plan.layers[kind.layers[0]].capacity // self._page_size, buffers)
            for kind in manifest.cache_kinds
        }
        for kind in manifest.cache_kinds:
            if kind.window > 0:
                table = self._tables[kind.name]
                table.resize(table.free)
        self._slot_bytes = [layer.slot_bytes for layer in plan.layers]
        super().__init__(manifest, plan, capture_rows, buffers)
        if capacities:
            full = {i: capacities[i] for i, kind in self._kinds.items() if kind.window < 0}
            self.fit(full, dict.fromkeys(full, 0))

    @property
    def bytes(self) -> int:
        """Bytes of the pages in use."""
        return sum(self._page_bytes(i) * self._table(i).used for i in self._kinds)

    @property
    def free_bytes(self) -> int:
        """Bytes of the pools' other pages."""
        return sum(self._page_bytes(i) * self._table(i).free for i in self._kinds)

    def capacity(self, index: int) -> int:
        """Return the slots of the pages that one layer's cache has."""
        return self._table(index).used * self._page_size

    def fit(self, slots: Mapping[int, int], held: Mapping[int, int]) -> None:
        """Take or free pages: a kind has what its largest layer needs, and what layers hold stays where it is."""
        wanted: dict[str, int] = {}
        for index, capacity in slots.items():
            assert held[index] <= capacity
            name = self._kinds[index].name
            wanted[name] = max(wanted.get(name, 0), capacity)
        for name, capacity in wanted.items():
            self._tables[name].resize(-(-capacity // self._page_size))

    def release(self, slots: Mapping[int, int], held: Mapping[int, int]) -> None:
        """Give pages past the slots of every layer of a kind back."""
        self.fit({index: min(capacity, self.capacity(index)) for index, capacity in slots.items()}, held)

    def blocks(self, index: int, head: int, begin: int, count: int) -> Iterator[tuple[Array, Array]]:
        """Yield keys and values of slots begin .. begin + count of one kv head, [n, D], at most a page at a time."""
        layer, pages, end = self.layers[index], self._table(index).pages, begin + count
        while begin < end:
            row = begin % self._page_size
            rows = slice(row, min(self._page_size, row + end - begin))
            page = pages[begin // self._page_size]
            with self.buffers.scope():
                block = layer.key[page, head, rows], layer.value[page, head, rows]
            yield block
            begin += rows.stop - rows.start

    def tables(self) -> dict[str, Array]:
        """Map the graph's input names to the block tables, [1, M] int32 each."""
        return {kind.block_table: self._tables[kind.name].array for kind in self._kinds.values()}

    def tables_in_use(self) -> dict[str, Array]:
        """Return the block tables without the columns past the pages in use."""
        used = {kind.block_table: self._tables[kind.name].used for kind in self._kinds.values()}
        return {name: array[:, : used[name]] for name, array in self.tables().items()}

    def _table(self, index: int) -> PageTable:
        return self._tables[self._kinds[index].name]

    def _page_bytes(self, index: int) -> int:
        return self._page_size * self._slot_bytes[index]

    def _shape(self, index: int, capacity: int) -> tuple[int, ...]:
        layer = self._manifest.layers[index]
        return capacity // self._page_size, layer.num_kv_heads, self._page_size, layer.head_size


def make_caches(
    manifest: Manifest,
    plan: CachePlan,
    capture_rows: int,
    buffers: Buffers,
    capacities: Sequence[int] | None = None,
) -> CacheBuffers:
    """Make the caches of one sequence, as the model's graph takes them; `capacities` where they are restored."""
    kind = PagedCaches if manifest.paged else CacheBuffers
    return kind(manifest, plan, capture_rows, buffers, capacities)
