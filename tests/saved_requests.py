"""Saves a request between two given steps of an engine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

from ortolan import Engine
from ortolan.runtime.engine.stream import Stream

SECONDS = 60  # far more than a step takes


def save_midway(engine: Engine, submit: Callable[[], Stream], path: Path, steps: int) -> Stream:
    """Submit a request, and save it while the engine takes that step, so that it is saved before the next.

    Args:
        engine: one that nothing else uses.
        submit: makes the request.
        path: of the file.
        steps: counted from 1.
    """
    core = engine.worker.ask(lambda core: core)
    run, send, count = core.stepper.run, engine.worker.send, itertools.count(1)
    reached, sent = threading.Event(), threading.Event()

    def run_and_wait(rows):
        if next(count) == steps:
            reached.set()
            assert sent.wait(SECONDS)
        return run(rows)

    def send_and_tell(call):
        send(call)
        sent.set()

    core.stepper.run = run_and_wait
    try:
        stream = submit()
        assert reached.wait(SECONDS)
        engine.worker.send = send_and_tell
        stream.save(path)
    finally:
        sent.set()
        engine.worker.send, core.stepper.run = send, run
    return stream
