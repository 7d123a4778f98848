"""Keeps copies of what pages hold, in host memory and in files, for when the pages hold something else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ortolan.runtime.caches.page_files import PageFiles

Contents = npt.NDArray[np.uint8]  # [pages, bytes of a page]


class PageArchive:
    """Entries by a key that stands for what they hold; the longest unused go first.

    Attributes:
        host_bytes: of the entries in host memory.
    """

    def __init__(self, most_host_bytes: int, files: PageFiles | None) -> None:
        self.host_bytes = 0
        self._most_bytes, self._files = most_host_bytes, files
        self._held: OrderedDict[bytes, Contents] = OrderedDict()

    @property
    def disk_bytes(self) -> int:
        """Bytes of the entries in files."""
        return 0 if self._files is None else self._files.num_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._held or (self._files is not None and key in self._files)

    def put(self, key: bytes, contents: Contents) -> None:
        """Keep an entry, whose contents may not be changed any more."""
        if self._files is not None:
            self._files.put(key, contents)
        self._hold(key, contents)

    def get(self, key: bytes, page_bytes: int) -> Contents | None:
        """Return an entry of pages of so many bytes; None where it is gone or damaged."""
        contents = self._held.get(key)
        if contents is None and self._files is not None:
            contents = self._files.get(key, page_bytes)
        if contents is not None:
            self._hold(key, contents)
        return contents

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count entries as used, the last one the latest; those that are not there stay away."""
        for key in keys:
            if key in self._held:
                self._held.move_to_end(key)
        if self._files is not None:
            self._files.touch(keys)

    def close(self) -> None:
        """Finish what is being written, and let all entries in memory go."""
        if self._files is not None:
            self._files.close()
        self._held.clear()
        self.host_bytes = 0

    def _hold(self, key: bytes, contents: Contents) -> None:
        if key not in self._held:
            if contents.nbytes > self._most_bytes:
                return
            self._held[key] = contents
            self.host_bytes += contents.nbytes
        while self.host_bytes > self._most_bytes:
            _, dropped = self._held.popitem(last=False)
            self.host_bytes -= dropped.nbytes
