"""Warns of options that were given and do nothing, as another option that they need was not."""

from __future__ import annotations

import argparse
from typing import Any

from ortolan.cli.report import print_warning

_RANDOM = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None}  # options of random choice, and what they are if unset


def warn_of_idle_making(options: argparse.Namespace) -> None:
    """Warn of a page size for caches without pages, and of a window that changes none."""
    if options.page_size is not None and not options.paged:
        print_warning("--page-size has no effect without --paged")
    if getattr(options, "sliding_window", None) == 0:
        print_warning("--sliding-window 0 has no effect: it leaves the graph's windows as they are")


def warn_of_idle_sampling(options: argparse.Namespace, sampling: Any) -> None:
    """Warn of options of a random choice where the most likely token is taken."""
    if sampling.temperature > 0:
        return
    idle = [
        "--" + name.replace("_", "-") for name, unset in _RANDOM.items() if getattr(options, name) not in (None, unset)
    ]
    if idle:
        verb = "have" if len(idle) > 1 else "has"
        print_warning(f"{', '.join(idle)} {verb} no effect without --temperature above 0")
