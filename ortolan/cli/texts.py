"""Writes generated text to standard output, and says where it was cut off."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from ortolan.cli.report import print_warning


def write_text(pieces: Iterable[str]) -> None:
    """Write a text piece by piece, and end its line also where it breaks off, before anything is said of that."""
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def warn_of_full_context(model: Any, session: Any) -> None:
    """Warn where the last text of a session ended as its context is full."""
    from ortolan.runtime.caches.plan import context_advice

    if session.finish_reason == "context":
        advice = context_advice(session.plan.max_context, model.manifest)
        print_warning(f"the text ended at max_context = {session.plan.max_context}; {advice}")
