"""What the commands that make a model folder share: options of its caches, and how progress and warnings are shown."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ortolan.cli.progress import byte_progress
from ortolan.cli.report import print_warning

DEFAULT_PAGE_SIZE = 64


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of steps, caches and SnapKV."""
    parser.add_argument(
        "--chunk-size",
        type=int,
        help="prompt tokens per step (default: 2048; CUDA: up to 16384 where no layer has a window)",
    )
    parser.add_argument("--sink", type=int, default=0, help="first positions always kept (default: %(default)s)")
    parser.add_argument(
        "--snapkv-window",
        type=int,
        default=64,
        help="queries captured for SnapKV; 0: none (default: %(default)s)",
    )
    parser.add_argument("--paged", action="store_true", help="caches are pools of pages, which many sequences share")
    parser.add_argument(
        "--page-size",
        type=int,
        help=f"slots of a page, with --paged: 16, 32, 64, 128 or 256 (default: {DEFAULT_PAGE_SIZE})",
    )


@contextmanager
def shown_progress() -> Iterator[Callable[[int, int], None]]:
    """Show a bar of the weights' bytes on a terminal, and afterwards each warning as one line."""
    with byte_progress("weights") as progress, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield progress
    for warning in caught:
        print_warning(warning.message)
