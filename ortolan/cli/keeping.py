"""What commands keep of a session: a file from which it goes on, and its statistics."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ortolan.cli.report import STANDARD, check_report_target, write_report
from ortolan.errors import ConfigError, file_path

QUERIES_READ_AGAIN = 256  # tokens that a short question's eviction may read again for their queries, by any policy


def add_keeping_options(parser: argparse.ArgumentParser, *, save: str, load: str) -> None:
    """Add the options; `save` and `load` say when a session is saved, and how it goes on."""
    parser.add_argument(
        "--stats-json", metavar="FILE", help="write counters and timings; - for standard error (default: neither)"
    )
    group = parser.add_argument_group("saved sessions")
    group.add_argument("--save-session", type=Path, metavar="FILE", help=f"{save} (default: none)")
    group.add_argument("--load-session", type=Path, metavar="FILE", help=f"{load} (default: a new session)")


def check_kept_files(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written, and statistics that would replace a session. Raises ConfigError."""
    if options.save_session:
        check_session_target("--save-session", options.save_session)
    check_report_target(options.stats_json)
    if options.stats_json in (None, STANDARD):
        return
    for name in ("save_session", "load_session"):
        path = getattr(options, name)
        if path and os.path.realpath(path) == os.path.realpath(options.stats_json):
            raise ConfigError(
                f"--stats-json names the file of --{name.replace('_', '-')}, {path}, which it would replace; give "
                "another name"
            )


def check_session_target(name: str, path: Path) -> None:
    """Refuse a file that no session can be saved to; `name` is the option's. Raises ConfigError."""
    from ortolan.runtime.saved.file import check_target

    check_target(file_path(name, path))


def save_session(session: Any, path: Path) -> None:
    """Save a session so that it can go on with a question that evicts. Raises as `Session.save`."""
    session.save(path, rewind_tokens=QUERIES_READ_AGAIN)


def print_saved(session: Any, path: Path) -> None:
    """Say on standard error what was saved."""
    print(f"ortolan: {session.logical_length} tokens were read: {path}", file=sys.stderr)


def write_stats(target: str, session: Any) -> None:
    """Write what a session did, and what it holds. Raises StorageError."""
    stats = session.stats.as_dict() | {
        "finish_reason": session.finish_reason,
        "logical_length": session.logical_length,
        "cache_bytes": session.cache_bytes,
        "full_length_cache_bytes": session.plan.full_length_bytes,
        "memory": session.memory_report().as_dict(),
    }
    write_report(target, stats, sys.stderr)
