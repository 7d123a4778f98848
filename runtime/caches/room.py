"""Gives one session's caches room: whole pages, or contiguous caches of another size."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ortolan.errors import CapacityError
from ortolan.runtime.caches.pages import PagePool
from ortolan.runtime.caches.plan import CachePlan
from ortolan.runtime.caches.store import CacheStore, SequenceCaches


class ContiguousRoom:
    """One page per layer, which is replaced by one of another size.

    Attributes:
        is_cheap: whether caches grow while steps are under way: no array is replaced.
    """

    is_cheap = False

    def __init__(self, store: CacheStore) -> None:
        self._store = store

    @property
    def bytes(self) -> int:
        """Bytes of the arrays."""
        return self._store.bytes

    @property
    def free_bytes(self) -> int:
        """None: every array is a cache."""
        return 0

    def fit(self, slots: Mapping[int, int], held: Mapping[int, int]) -> None:
        """Make the caches of layers that grow as large as said.

        Args:
            slots: what each is to have; all of them are given.
            held: tokens in each, which are kept; at most its slots.

        Raises:
            CapacityError: there is no memory.
        """
        self._store.resize(slots, held)

    def shrink(self, slots: Mapping[int, int], held: Mapping[int, int]) -> None:
        """Replace arrays, where there is memory for both the old and the new ones."""
        with suppress(CapacityError):
            self._store.resize(slots, held)

    def release(self, slots: Mapping[int, int], held: Mapping[int, int]) -> None:
        """Give back what costs nothing to give back past these slots: nothing, as a smaller array costs a copy."""


class PagedRoom:
    """Pages of pools that are as large as the plan, its own or shared. A kind has what its largest layer needs.

    Attributes:
        pools: of each kind.
    """

    is_cheap = True

    def __init__(
        self,
        store: CacheStore,
        plan: CachePlan,
        caches: SequenceCaches,
        pages: dict[str, list[int]],
        pools: Mapping[str, PagePool] | None = None,
    ) -> None:
        """Give the sequence all pages of what does not grow, and of the rest none; `pages` is changed in place.

        Raises:
            CapacityError: shared pools do not have them.
        """
        self._store, self._caches, self._pages, self._page_size = store, caches, pages, plan.page_size
        self.pools = pools or {kind.name: PagePool(kind.name, kind.num_pages) for kind in plan.kinds}
        self._page_bytes = {kind.name: kind.page_bytes for kind in plan.kinds}
        pages.update((kind.name, []) for kind in plan.kinds)
        fixed = [kind for kind in plan.kinds if not kind.grows]
        if any(self.pools[kind.name].available < kind.table_pages for kind in fixed):
            raise CapacityError("the pools have no pages for one more sequence")
        for kind in fixed:
            self._resize(kind.name, kind.table_pages)

    @property
    def bytes(self) -> int:
        """Bytes of the pages in use."""
        return sum(len(self._pages[name]) * size for name, size in self._page_bytes.items())

    @property
    def free_bytes(self) -> int:
        """Bytes of the pools' other pages."""
        return sum(self.pools[name].available * size for name, size in self._page_bytes.items())

    def fit(self, slots: Mapping[int, int], held: Mapping[int, int]) -> None:
        """Take or free pages at the table's end; what layers hold stays where it is."""
        wanted: dict[str, int] = {}
        for index, capacity in slots.items():
            kind = self._store.kind(index)
            assert kind is not None
            wanted[kind.name] = max(wanted.get(kind.name, 0), -(-capacity // self._page_size))
        for name, count in wanted.items():
            self._resize(name, count)

    def shrink(self, slots: Mapping[int, int], held: Mapping[int, int]) -> None:
        """Free pages."""
        self.fit(slots, held)

    def release(self, slots: Mapping[int, int], held: Mapping[int, int]) -> None:
        """Free pages past the slots of every layer of a kind."""
        self.fit({index: min(count, self._caches.capacity(index)) for index, count in slots.items()}, held)

    def close(self) -> None:
        """Give all pages back."""
        for name in self._pages:
            self._resize(name, 0)

    def _resize(self, name: str, count: int) -> None:
        pages, pool = self._pages[name], self.pools[name]
        if count > len(pages) + pool.available:
            raise CapacityError(
                f"{count} pages are needed, the pool has {len(pages) + pool.available}; make the session with a larger "
                "max_context"
            )
        while len(pages) < count:
            pages.append(pool.take())
        while len(pages) > count:
            pool.release(pages.pop())


Room = ContiguousRoom | PagedRoom  # how a session's caches grow and shrink
