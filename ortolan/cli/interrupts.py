"""Lets Ctrl-C end what a session computes at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
SIGNALS_AT_ONCE = 16  # read together


@contextlib.contextmanager
def held(numbers: Iterable[int]) -> Iterator[None]:
    """Let signals wait until the block ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let a handler take signals until the block ends, in the main thread; then those before take them again."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


@contextlib.contextmanager
def interruptible(interrupt: Callable[[], object]) -> Iterator[None]:
    """Call a function when a signal comes that Python handles, also while ONNX Runtime computes.

    Python's own handlers run in the main thread, once it is back from ONNX Runtime. So the function is called in
    another thread, which the system wakes. The first Ctrl-C does no more than that, so that the session ends where its
    state is whole, and at the latest raises KeyboardInterrupt at the block's end; a second one raises it anywhere.
    """
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or a caller's
        yield
        return
    presses = 0

    def note(number: int, _: object) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    with _woken(interrupt):
        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if presses:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _woken(call: Callable[[], object]) -> Iterator[None]:
    """Call a function in a thread of its own whenever a signal comes that Python handles."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(reader, SIGNALS_AT_ONCE):
            call()

    watcher = threading.Thread(target=watch, name="ortolan-signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        watcher.join()
        os.close(reader)
