"""Keeps the contents of pages in files of a folder, which engines of other processes and times can read.

A file holds one entry: the bytes of its pages, and a digest of these with the file's name, so that one that was cut
short or altered is noticed. Files are written under another name and renamed. The one that was unused the longest goes
first; the time of a file's last use is its modification time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import ConfigError

SUFFIX = ".pages"
DIGEST_BYTES = 16
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
        self._coming: set[str] = set()  # on their way to the disk
        self._lock = threading.Lock()  # of these three
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
        name = _name(key)
        with self._lock:
            if name in self._sizes or name in self._coming or contents.nbytes + DIGEST_BYTES > self._most_bytes:
                return
            self._coming.add(name)
        self._writer.submit(self._write, name, contents)

    def get(self, key: bytes, page_bytes: int) -> npt.NDArray[np.uint8] | None:
        """Read an entry of pages of so many bytes; None where there is none, or it is damaged."""
        name = _name(key)
        if name not in self._sizes:
            return None
        path = self._folder / name
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:  # another process has removed it
            self._forget(name)
            return None
        body = memoryview(data)[:-DIGEST_BYTES]
        if len(body) % page_bytes or not body or _digest(name, body) != data[-DIGEST_BYTES:]:
            _log.warning("%s is damaged, and removed", path)
            path.unlink(missing_ok=True)
            self._forget(name)
            return None
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        return np.frombuffer(body, np.uint8).reshape(-1, page_bytes)

    def flush(self) -> None:
        """Wait until all that was put is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write what was put, and end the thread."""
        self._writer.shutdown()

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
                self._coming.discard(name)

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
