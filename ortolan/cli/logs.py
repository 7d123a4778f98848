"""Writes what Ortolan logs to standard error."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator

LEVELS = ("debug", "info", "warning", "error")
DEFAULT_LEVEL = "warning"
SHOWN = ("ortolan", "uvicorn")  # ours, and the HTTP server's


def add_log_option(parser: argparse.ArgumentParser, default: str) -> None:
    """Add --log-level."""
    parser.add_argument(
        "--log-level",
        choices=LEVELS,
        default=default,
        help=f"what to write of the log to standard error: {', '.join(LEVELS)} (default: {DEFAULT_LEVEL})",
    )


@contextlib.contextmanager
def shown_log(level: str) -> Iterator[None]:
    """Write what is logged under names of SHOWN from a level on, a line each, until the block ends."""
    import logging  # here, as a help text does not need it

    class OneLine(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return f"ortolan: {record.levelname.lower()}: {' '.join(record.getMessage().split())}"

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine())
    before = {logger: logger.level for logger in map(logging.getLogger, SHOWN)}
    for logger in before:
        logger.addHandler(handler)
        logger.setLevel(level.upper())
    try:
        yield
    finally:
        for logger, own in before.items():
            logger.removeHandler(handler)
            logger.setLevel(own)
