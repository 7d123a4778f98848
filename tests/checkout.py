"""Chooses which ortolan the tests import: the checkout's where its library is built, else the installed package."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "custom_ops" / "lib" / "libortolan_ops.so"


def choose() -> str | None:
    """Put the chosen package on the path of this process and of those it starts; return what is missing, or None."""
    sys.path[:] = _entries(sys.path)
    os.environ["PYTHONPATH"] = os.pathsep.join(_entries(os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if importlib.util.find_spec("ortolan") is None:
        return f"{LIBRARY} does not exist and ortolan is not installed; run `pip install -e '.[test]'`"
    return None


def _entries(entries: list[str]) -> list[str]:
    """Return the entries of a path with the checkout first where its library is built, else without it."""
    others = [entry for entry in entries if entry and Path(entry).resolve() != ROOT]
    return [str(ROOT), *others] if LIBRARY.is_file() else others
