"""Folders that a whole run of the tests shares: made once, by the process that asks first, and changed by nobody."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = "ORTOLAN_SHARED_FOLDERS"  # in the environment, where pytest-xdist's processes find it


@contextmanager
def shared_folders() -> Iterator[None]:
    """Make room for the folders of a run, and remove it at its end."""
    with tempfile.TemporaryDirectory(prefix="ortolan-shared-") as folder:
        os.environ[FOLDER] = folder
        yield
        del os.environ[FOLDER]


def shared(name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder of that name, which `make` has written in this process or in another.

    Args:
        name: whatever tells this folder from others.
        make: writes the folder that it is given, which does not exist.
    """
    folder = Path(os.environ[FOLDER]) / hashlib.sha256(name.encode()).hexdigest()[:24]
    with open(folder.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
                make(Path(unfinished) / "made")
                (Path(unfinished) / "made").rename(folder)
    return folder
