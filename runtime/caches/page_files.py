"""Keeps the contents of pages in files of a folder, which engines of other processes and times can read.

A file holds one entry: the bytes of its pages, and a digest of these with the file's name, so that one that was cut
short or altered is noticed. Files are written under another name and renamed. The one that was unused the longest goes
first; who closes a folder leaves the order to the next one in the times of the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import ConfigError

SUFFIX = ".pages"
DIGEST_BYTES = 16
MOST_PENDING_BYTES = 2**30  # of contents that wait for the disk; more are left out
_log = logging.getLogger(__name__)


class PageFiles:
    """The entries of one folder, which belong to one model and one way to lay out its caches.

    What cannot be read or written is left out, and the log says so. A thread of its own writes.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Open a folder, which is made where it is missing; its files take `most_bytes` at most.

        Raises:
            ConfigError: the folder cannot be made, read or written to.
        """
        self._folder, self._most_bytes = folder, most_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = [(path.stat(), path.name) for path in folder.iterdir() if path.suffix == SUFFIX]
        except OSError as error:
            raise ConfigError(f"disk_cache: {folder} cannot be used: {error.strerror or error}") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"disk_cache: {folder} may not be written to; give another folder")
        found.sort(key=lambda each: each[0].st_mtime_ns)
        self._sizes = OrderedDict((name, status.st_size) for status, name in found)  # the longest unused first
        self._bytes = sum(self._sizes.values())
        self._coming: dict[str, int] = {}  # bytes on their way to the disk, by name
        self._used: set[str] = set()  # since the folder was opened
        self._lock = threading.Lock()  # of these four
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ortolan-pages")
        self._has_failed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return self._bytes

    def __contains__(self, key: bytes) -> bool:
        return _name(key) in self._sizes

    def put(self, key: bytes, contents: npt.NDArray[np.uint8]) -> None:
        """Write an entry soon; its contents, [pages, bytes of a page], may not be changed any more."""
        name, size = _name(key), contents.nbytes + DIGEST_BYTES
        with self._lock:
            if name in self._sizes or name in self._coming or size > self._most_bytes:
                return
            if sum(self._coming.values()) + size > MOST_PENDING_BYTES:
                return
            self._coming[name] = size
        self._writer.submit(self._write, name, contents)

    def get(self, key: bytes, page_bytes: int) -> npt.NDArray[np.uint8] | None:
        """Read an entry of pages of so many bytes; None where there is none, or it is damaged."""
        name = _name(key)
        if name not in self._sizes:
            return None
        path = self._folder / name
        try:
            data = path.read_bytes()
        except OSError:  # another process has removed it
            self._forget(name)
            return None
        body = memoryview(data)[:-DIGEST_BYTES]
        if len(body) % page_bytes or not body or _digest(name, body) != data[-DIGEST_BYTES:]:
            _log.warning("%s is damaged, and removed", path)
            with contextlib.suppress(OSError):  # the folder may have become one that takes no changes
                path.unlink()
            self._forget(name)
            return None
        return np.frombuffer(body, np.uint8).reshape(-1, page_bytes)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count entries as used, once what was put before is written: the last one the latest."""
        self._writer.submit(self._touch, [_name(key) for key in keys])

    def close(self) -> None:
        """Write what was put and the times of what was used, and end the thread."""
        self._writer.shutdown()
        now = time.time_ns()
        for place, name in enumerate(self._sizes):
            if name in self._used:
                with contextlib.suppress(OSError):  # another process has removed it
                    os.utime(self._folder / name, ns=(now + place, now + place))

    def _write(self, name: str, contents: npt.NDArray[np.uint8]) -> None:
        temporary, size = self._folder / f".{secrets.token_hex(8)}.tmp", contents.nbytes + DIGEST_BYTES
        body: Any = contents.reshape(-1).data
        try:
            self._make_room(size)
            with open(temporary, "xb") as file:
                file.write(body)
                file.write(_digest(name, body))
            temporary.rename(self._folder / name)
            with self._lock:
                self._sizes[name] = size
                self._bytes += size
        except OSError as error:
            if not self._has_failed:
                _log.warning("disk_cache: %s cannot be written: %s", self._folder, error.strerror or error)
            self._has_failed = True
            temporary.unlink(missing_ok=True)
        finally:
            with self._lock:
                del self._coming[name]

    def _touch(self, names: Sequence[str]) -> None:
        with self._lock:
            for name in names:
                if name in self._sizes:
                    self._sizes.move_to_end(name)
                    self._used.add(name)

    def _make_room(self, size: int) -> None:
        while self._bytes + size > self._most_bytes:
            with self._lock:
                name = next(iter(self._sizes))
            (self._folder / name).unlink(missing_ok=True)
            self._forget(name)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._bytes -= self._sizes.pop(name, 0)


def _name(key: bytes) -> str:
    return key.hex() + SUFFIX


def _digest(name: str, body: Any) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES, key=name.encode()[:64]).digest()
