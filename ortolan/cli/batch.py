"""`ortolan batch`: answers a file of OpenAI's requests, and goes on where it was left."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from ortolan.cli.engines import add_engine_options, open_service
from ortolan.cli.interrupts import ENDING_SIGNALS, handled
from ortolan.cli.progress import run_bar
from ortolan.cli.report import check_report_target
from ortolan.errors import ConfigError, OrtolanError

AHEAD = 2  # requests that are submitted for each that runs
EPILOG = """A line of INPUT is a request, a line of OUTPUT its result, in any order:
  {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 40}}
  {"id": "...", "custom_id": "1", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

examples:
  ortolan batch ./paged-model requests.jsonl results.jsonl
"""


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests",
        description="Answer a file of requests in OpenAI's batch format. What is answered is kept at Ctrl-C or an "
        "error, and the same command goes on from there. Exit code 1: some requests could not be answered; their "
        "results say why.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_options(parser)
    parser.add_argument("input", type=Path, metavar="INPUT", help="file of requests, JSON lines")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="file of results to write, JSON lines")
    parser.add_argument("--overwrite", action="store_true", help="replace OUTPUT if it exists")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answer all requests, and say how many had no answer."""
    import asyncio

    from ortolan.serving.batch import Results, answer_lines, read_batch

    batch = read_batch(options.input)
    check_report_target(str(options.output))
    if options.output.exists() and not options.overwrite:
        raise ConfigError(f"{options.output} exists; choose another file, or overwrite it (--overwrite)")
    with open_service(options) as service:
        results = Results(options.output, batch)
        left = [line for line in batch.lines if line.custom_id not in results.statuses]
        if len(left) < len(batch.lines):
            print(f"ortolan: {len(batch.lines) - len(left)} requests were answered before", file=sys.stderr)
        try:
            with run_bar(len(left)) as bar:
                at_once = AHEAD * service.engine.plan.max_sequences
                asyncio.run(_until_told(answer_lines(service, left, results, at_once, bar.update)))
        except ExceptionGroup as errors:
            raise _first(errors) from errors
        finally:
            results.close()
        results.finish()
    failed = sum(status >= 400 for status in results.statuses.values())
    if failed:
        print(
            f"ortolan: {failed} of {len(batch.lines)} requests have no answer; {options.output} says why",
            file=sys.stderr,
        )
    return 1 if failed else 0


async def _until_told(work: Coroutine[Any, Any, None]) -> None:
    """Work until a signal comes that ends the command; it is raised again once the work has stopped between two steps.

    What its handler raises could otherwise come in the middle of asyncio's own code.
    """
    import asyncio

    if threading.current_thread() is not threading.main_thread():  # others get no signals
        await work
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    told: list[int] = []

    def tell(number: int, _: object) -> None:
        told.append(number)
        loop.call_soon_threadsafe(task.cancel)

    heeded = [number for number in ENDING_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    try:
        with handled(heeded, tell):
            await work
    except asyncio.CancelledError:
        if not told:
            raise
    if told:
        signal.raise_signal(told[0])


def _first(errors: ExceptionGroup[Any]) -> Exception:
    """Return one of several errors, which all have one cause: an OrtolanError if there is one."""
    known = errors.subgroup(OrtolanError)
    first: Exception = (known or errors).exceptions[0]
    return first
