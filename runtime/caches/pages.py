"""Counts the pages of a cache kind: which are free, who holds the others, and which can serve again.

A page is in exactly one of three places: free; held by one or more sequences; or kept, held by nobody but with
contents that the prefix index knows, so that a later prompt may take it up. Kept pages are given out again when
no free one is left, the longest unused first.

Source: vLLM, arXiv 2309.06180 (pages and reference counts); SGLang, arXiv 2312.07104 (prefixes kept until their pages
are needed).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ortolan.errors import CapacityError, OrtolanError

DIGEST_BYTES = 16


class PrefixIndex:
    """Maps what pages hold, by a digest of all tokens up to their end, to pages.

    A cache that grows has a page for each digest. Of what is written over, a digest stands for all pages of a snapshot.
    """

    def __init__(self) -> None:
        self._pages: dict[bytes, tuple[int, ...]] = {}
        self._digests: dict[int, bytes] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._digests

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, digest: bytes, *pages: int) -> None:
        """Note what pages hold; where others are known to hold the same, those stay."""
        if digest not in self._pages and not any(page in self._digests for page in pages):
            self._pages[digest] = pages
            self._digests |= dict.fromkeys(pages, digest)

    def forget(self, page: int) -> None:
        """Take a page out, because its contents are about to change, with the others of its digest."""
        digest = self._digests.get(page)
        if digest is not None:
            for each in self._pages.pop(digest):
                del self._digests[each]

    def get(self, digest: bytes) -> tuple[int, ...]:
        """Return the pages of a digest; none where it is not known."""
        return self._pages.get(digest, ())

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest known prefix of a chain of digests."""
        pages: list[int] = []
        for digest in digests:
            found = self._pages.get(digest)
            if found is None:
                break
            pages += found
        return pages


def extend_chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a page's tokens after the pages that `parent` stands for; b"" begins a sequence."""
    return hashlib.blake2b(parent + np.asarray(tokens, np.int64).tobytes(), digest_size=DIGEST_BYTES).digest()


class DigestChain:
    """Digests of a sequence's whole pages, each of all tokens up to a page's end; each is computed once."""

    def __init__(self) -> None:
        self._root, self._digests = b"", list[bytes]()

    def first(self, pages: int, tokens: Sequence[int], page_size: int, root: bytes = b"") -> list[bytes]:
        """Return the digests of the first `pages` pages.

        Args:
            pages: how many are wanted.
            tokens: of the sequence; those of pages that were asked for before are what they were.
            page_size: tokens of a page.
            root: what the chain begins with.
        """
        if root != self._root:
            self._root, self._digests = root, []
        for page in range(len(self._digests), pages):
            parent = self._digests[-1] if page else root
            self._digests.append(extend_chain(parent, tokens[page * page_size : (page + 1) * page_size]))
        return self._digests[:pages]


class PagePool:
    """The pages 0 .. num_pages - 1 of one cache kind."""

    def __init__(self, name: str, num_pages: int, index: PrefixIndex | None = None) -> None:
        self.name, self.num_pages, self.index = name, num_pages, index
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._kept: OrderedDict[int, None] = OrderedDict()  # the longest unused first

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def kept(self) -> int:
        """Pages that nobody holds and that can serve a prompt with their prefix."""
        return len(self._kept)

    @property
    def held(self) -> int:
        """Pages that sequences hold."""
        return self.num_pages - self.available

    @property
    def available(self) -> int:
        """Pages that `take` can give out."""
        return len(self._free) + len(self._kept)

    def holders(self, page: int) -> int:
        """Return how many sequences hold a page."""
        return self._holders[page]

    def take(self) -> int:
        """Give out a page, whose contents mean nothing.

        Raises:
            CapacityError: all pages are held.
        """
        if self._free:
            page = self._free.pop()
        elif self._kept:
            page, _ = self._kept.popitem(last=False)
            if self.index is not None:
                self.index.forget(page)
        else:
            raise CapacityError(f"all {self.num_pages} pages of {self.name!r} are held")
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """Let one more sequence hold a page whose contents the index knows."""
        if self.index is None or page not in self.index:
            raise OrtolanError(f"page {page} of {self.name!r} holds nothing that could be shared")
        self._kept.pop(page, None)
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """Let one holder of a page go; the last one leaves it free, or kept where the index knows its contents."""
        if not 0 <= page < self.num_pages or not self._holders[page]:
            raise OrtolanError(f"page {page} of {self.name!r} is released, but nobody holds it")
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if self.index is not None and page in self.index:
            self._kept[page] = None
        else:
            self._free.append(page)
