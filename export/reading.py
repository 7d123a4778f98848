"""Turns what keeps files from being read into errors that name the file."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ortolan.errors import CheckpointError
from ortolan.folders import pointer_problem


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Read a file of a checkpoint or of a foreign model.

    Raises:
        CheckpointError: the operating system refuses, or the file is a git-lfs pointer; the message names the file and
            says why.
    """
    if pointer := pointer_problem(path):
        raise CheckpointError(pointer)
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def is_file(path: Path) -> bool:
    """Say whether there is such a file; unlike Path's, it takes names that are too long.

    Raises:
        CheckpointError: its folder does not let us look.
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (OSError, ValueError):
        return False
