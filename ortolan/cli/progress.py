"""Shows how far long work is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


def token_bar(total: int) -> Any:
    """Make a progress bar of `total` prompt tokens on standard error, shown on a terminal only."""
    from tqdm import tqdm

    return tqdm(total=total, unit="token", desc="prefill", leave=False, disable=not sys.stderr.isatty())


def run_bar(total: int) -> Any:
    """Make a progress bar of `total` runs on standard error, shown on a terminal only."""
    from tqdm import tqdm

    return tqdm(total=total, unit="run", leave=False, mininterval=0, disable=not sys.stderr.isatty())


@contextlib.contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar of bytes on a terminal; gives what to call with (bytes done, bytes in all)."""
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, desc=what, disable=not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
