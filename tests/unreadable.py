"""Takes away the right to read or write a file or a folder, also from root, whom permissions do not stop."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def _guarded(function: Callable[..., Any], denies: Callable[[Path], bool]) -> Callable[..., Any]:
    def guarded(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str | os.PathLike) and denies(Path(path)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return function(path, *arguments, **options)

    return guarded


def make_unreadable(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Let nobody open a file; of a folder, nobody list it or reach what is inside."""
    is_folder = path.is_dir()
    path.chmod(0)
    if not os.access(path, os.R_OK):
        return

    def opens(other: Path) -> bool:
        return other == path or (is_folder and path in other.parents)

    for module, name in ((builtins, "open"), (io, "open"), (os, "listdir"), (os, "scandir")):
        patch.setattr(module, name, _guarded(getattr(module, name), opens))
    patch.setattr(os, "stat", _guarded(os.stat, lambda other: is_folder and path in other.parents))


def make_unwritable(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Let nobody write a file, or make one in a folder."""
    path.chmod(path.stat().st_mode & ~0o222)
    access = os.access
    if access(path, os.W_OK):
        patch.setattr(os, "access", lambda other, mode: Path(other) != path and access(other, mode))
