"""Keeps beginnings of sequences beyond the pages that hold them: copies go to host memory and to files, and come back.

What the prefix index learns is copied once. Before a waiting sequence may be admitted, what the archive knows of its
beginning, and no page holds any more, is written to pages that nobody holds. These are kept as any other prefix then,
and the sequence finds them by the index.

Source: Mooncake, arXiv 2407.00079 (prefixes in host memory and on disks).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ortolan.errors import OrtolanError
from ortolan.runtime.caches.page_archive import PageArchive
from ortolan.runtime.caches.plan import CachePlan, KindPlan
from ortolan.runtime.engine.pool_caches import PoolCaches
from ortolan.runtime.engine.prefixes import Offered, Prefixes
from ortolan.runtime.engine.sequence import TokenSequence

_log = logging.getLogger(__name__)


class PrefixArchive:
    """The archive of one engine's prefixes.

    Attributes:
        pages: entries in memory and files.
        restored_pages: how many pages came back.
    """

    def __init__(self, pages: PageArchive, prefixes: Prefixes, pools: PoolCaches, plan: CachePlan) -> None:
        self.pages, self.restored_pages = pages, 0
        self._prefixes, self._pools, self._plan = prefixes, pools, plan
        self._kinds = {kind.name: kind for kind in plan.kinds}
        self._numbers = {kind.name: bytes([number]) for number, kind in enumerate(plan.kinds)}
        self._has_failed = False

    def keep(self, sequence: TokenSequence, offered: Sequence[Offered]) -> None:
        """Copy what the index has just learned of a sequence, where the archive lacks it."""
        if self._has_failed or not offered:
            return
        try:
            for name in self._kinds:
                new = [each for each in offered if each.kind == name and self._key(name, each.digest) not in self.pages]
                if not new:
                    continue
                contents, row = self._pools.read(name, [page for each in new for page in each.pages]), 0
                for each in new:
                    rows = contents[row : (row := row + len(each.pages))]
                    self.pages.put(self._key(name, each.digest), rows.copy())
        except OrtolanError as error:
            self._fail(error)
        self._touch(self._prefixes.offered(sequence))

    def bring(self, sequence: TokenSequence) -> None:
        """Write to pages what is archived of a waiting sequence's beginning, once there are pages for it."""
        if self._has_failed or sequence.was_sought:
            return
        digests = self._prefixes.chain(sequence)
        count = self._longest(sequence, digests)
        entries = [(kind, digest) for digest in digests[:count] for kind in self._plan.kinds if kind.grows]
        entries += [(kind, digests[count - 1]) for kind in self._plan.kinds if count and not kind.grows]
        held: list[tuple[str, int]] = []
        try:
            sequence.was_sought = self._fill(entries, held)
        except OrtolanError as error:
            self._fail(error)
        finally:
            for name, page in reversed(held):  # of a kept prefix the end is given out first
                self._prefixes.pools[name].release(page)
        self._touch(digests[:count])

    def close(self) -> None:
        """Finish what is being written."""
        self.pages.close()

    def _fill(self, entries: Sequence[tuple[KindPlan, bytes]], held: list[tuple[str, int]]) -> bool:
        """Hold the pages of entries, those that the archive fills included; False where there are too few."""
        pools, index = self._prefixes.pools, self._prefixes.pages_of
        missing = [(kind, digest) for kind, digest in entries if not index(kind.name, digest)]
        if not missing:
            return True
        for kind, digest in entries:
            for page in index(kind.name, digest):
                pools[kind.name].share(page)
                held.append((kind.name, page))
        for kind in self._plan.kinds:
            count = sum(1 if kind.grows else kind.table_pages for each, _ in missing if each is kind)
            if pools[kind.name].available < count:
                return False
        for kind, digest in missing:
            contents = self.pages.get(self._key(kind.name, digest), self._pools.page_bytes(kind.name))
            if contents is None:  # gone meanwhile, or damaged: what comes before it serves all the same
                return True
            pages = [pools[kind.name].take() for _ in contents]
            held += [(kind.name, page) for page in pages]
            self._pools.write(kind.name, pages, contents)
            self._prefixes.publish(kind.name, digest, pages)
            self.restored_pages += len(pages)
        return True

    def _touch(self, digests: Sequence[bytes]) -> None:
        """Count a beginning as used, its end before what it needs."""
        self.pages.touch([self._key(name, digest) for digest in reversed(digests) for name in self._kinds])

    def _longest(self, sequence: TokenSequence, digests: Sequence[bytes]) -> int:
        """Return the pages of the longest beginning that index and archive know together."""
        growing = [kind.name for kind in self._plan.kinds if kind.grows]
        fixed = [kind.name for kind in self._plan.kinds if not kind.grows]
        known = 0
        while known < len(digests) and all(self._knows(name, digests[known]) for name in growing):
            known += 1
        while known and not (
            self._prefixes.may_cut(sequence, known) and all(self._knows(name, digests[known - 1]) for name in fixed)
        ):
            known -= 1
        return known

    def _knows(self, name: str, digest: bytes) -> bool:
        return bool(self._prefixes.pages_of(name, digest)) or self._key(name, digest) in self.pages

    def _key(self, name: str, digest: bytes) -> bytes:
        return digest + self._numbers[name]

    def _fail(self, error: OrtolanError) -> None:
        """Go on without the archive."""
        _log.warning("prefixes are not archived any more: %s", error)
        self._has_failed = True
