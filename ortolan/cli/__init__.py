"""The `ortolan` command: one file for each of its commands."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from ortolan.cli import batch, bench, chat, convert, demo, export, generate, inspect, perplexity, serve
from ortolan.cli.interrupts import ENDING_SIGNALS, handled, held
from ortolan.cli.logs import DEFAULT_LEVEL, add_log_option, shown_log
from ortolan.cli.report import print_error
from ortolan.errors import OrtolanError, SessionInterruptedError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
EXIT_SIGNALLED = 128  # and the signal's number
STANDARD_ERROR = 2  # descriptor


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all of Ortolan's; commands' parsers are of this class too."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what a command does not know by the command's own parser, which names its help."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name for action in self._actions for name in action.option_strings]
            close = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Print the message and the command that explains it, and exit."""
        self.exit(EXIT_USAGE, f"ortolan: error: {message}; see `{self.prog} --help`\n")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    import ortolan

    parser = _Parser(prog="ortolan", description="Long-context LLM inference on ONNX Runtime.")
    parser.add_argument("--version", action="version", version=f"ortolan {ortolan.__version__}")
    add_log_option(parser, DEFAULT_LEVEL)
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for command in (export, convert, generate, chat, serve, batch, inspect, bench, perplexity, demo):
        command.add_parser(commands)
    for each in commands.choices.values():
        add_log_option(each, argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 failed, 2 bad argument, 130 interrupted, 143 terminated."""
    _occupy_closed_descriptors()
    sys.stdout, sys.stderr = (stream or io.StringIO() for stream in (sys.stdout, sys.stderr))  # either may be closed
    options = build_parser().parse_args(arguments)
    with _cleaned_up_when_terminated(), shown_log(options.log_level):
        return _run(options)


def _occupy_closed_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed, or the next files would be what libraries take for standard error."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
        pass
    os.close(descriptor)


@contextlib.contextmanager
def _cleaned_up_when_terminated() -> Iterator[None]:
    """Unwind when the process is told to end, so that half-written folders are removed."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(EXIT_SIGNALLED + number)

    with handled([number for number in ENDING_SIGNALS if signal.getsignal(number) == signal.SIG_DFL], leave):
        yield


def _load_libraries() -> None:
    """Import what all commands do, while signals wait: C code makes an ImportError of what a handler raises."""
    with held((signal.SIGINT, *ENDING_SIGNALS)), contextlib.suppress(ImportError):  # the command tells what is missing
        importlib.import_module("onnxruntime")


def _run(options: argparse.Namespace) -> int:
    """Run a command and turn what it raises into a line and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that its encoding lacks
    try:
        _load_libraries()
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except (KeyboardInterrupt, SessionInterruptedError):
        print("ortolan: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OrtolanError as error:
        print_error(error)
        return EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILED
    except OSError as error:  # of standard output; files' own are StorageErrors
        if not isinstance(error, BrokenPipeError):
            print_error(error)
        with contextlib.suppress(io.UnsupportedOperation):  # a closed one has no descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail once more
        return EXIT_FAILED
