"""Reads standard input line by line, and asks a terminal for each line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from ortolan.cli.prompts import PROMPT_SIGN, check_text, decoded
from ortolan.errors import ConfigError

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2  # descriptors


def is_terminal() -> bool:
    """Say whether somebody types the lines."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_line() -> str | None:
    """Return the next line without its end; None at the end of input.

    Raises:
        ConfigError: it is not UTF-8 text; the line after it can be read.
    """
    if sys.stdin is None:  # it may be closed
        return None
    try:
        line = _ask() if is_terminal() else _read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"a line is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if line is not None:
        check_text("a line", line)
    return line


def _read() -> str | None:
    """Read a line of a pipe as files are read, whatever the locale."""
    binary = getattr(sys.stdin, "buffer", None)
    given = binary.readline() if binary is not None else sys.stdin.readline().encode("utf-8", "surrogatepass")
    if not given:
        return None
    return decoded(given).removesuffix("\n")


def _ask() -> str | None:
    """Ask a terminal for a line, which can be edited, and whose earlier ones come back, where Python has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, `input` uses it once it is imported
    try:
        with _output_to_standard_error():
            return input(PROMPT_SIGN)
    except EOFError:
        print(file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise


@contextlib.contextmanager
def _output_to_standard_error() -> Iterator[None]:
    """Let standard output be standard error: `input` writes its prompt, and what is typed, to the former."""
    sys.stdout.flush()
    kept = os.dup(STANDARD_OUTPUT)
    os.dup2(STANDARD_ERROR, STANDARD_OUTPUT)
    try:
        yield
    finally:
        os.dup2(kept, STANDARD_OUTPUT)
        os.close(kept)
