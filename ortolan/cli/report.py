"""Writes what commands report: JSON to a file or a standard stream, warnings and errors to standard error."""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ortolan.errors import ConfigError, StorageError

STANDARD = "-"  # in place of a file's name
STREAMS = ("/dev/", "/proc/")  # what a shell has opened has names there, also where it is a file


def check_report_target(target: str | None) -> None:
    """Refuse a file that cannot be written, before the work that is to be reported. Raises ConfigError."""
    if target is None or target == STANDARD:
        return
    if not target:
        raise ConfigError("the report's file has no name; give one, or - for a standard stream")
    if os.path.isdir(target):
        raise ConfigError(f"{target} is a folder; give the name of the file to write")
    if not os.path.isdir(Path(target).parent):
        raise ConfigError(f"{Path(target).parent} is not a folder; create it, or give another name than {target}")
    is_there = os.path.exists(target)
    if not (os.access(target, os.W_OK) if is_there else os.access(Path(target).parent, os.W_OK | os.X_OK)):
        raise ConfigError(f"{target if is_there else Path(target).parent} may not be written to; give another file")


def write_report(target: str, report: Mapping[str, Any], standard: TextIO) -> None:
    """Write a report to a file, or to a stream where `target` is "-".

    Raises:
        StorageError: the file cannot be written; what it held is still there where another may take its place.
    """
    text = json.dumps(report, indent=2) + "\n"
    if target == STANDARD:
        standard.write(text)
        return
    try:
        _write_file(target, text)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error


def _write_file(target: str, text: str) -> None:
    """Write a file beside the target and give it its name, or write into one that no other may take the place of."""
    path = Path(os.path.realpath(target))
    if not _may_replace(target, path.parent):
        Path(target).write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".ortolan-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(text)
        try:
            os.replace(temporary, path)
        except OSError:  # as where it is mounted, or another user's in a folder for all
            path.write_text(text, encoding="utf-8")
    finally:
        temporary.unlink(missing_ok=True)


def _may_replace(target: str, folder: Path) -> bool:
    """Say whether another file may take a target's place: it is no pipe or stream, and its folder takes files."""
    if os.path.abspath(target).startswith(STREAMS) or (os.path.exists(target) and not os.path.isfile(target)):
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def print_warning(message: object) -> None:
    """Write one line to standard error."""
    _print_line("warning", message)


def print_error(message: object) -> None:
    """Write one line to standard error."""
    _print_line("error", message)


def _print_line(kind: str, message: object) -> None:
    print(f"ortolan: {kind}: {' '.join(str(message).split())}", file=sys.stderr)  # ONNX Runtime's take many lines
