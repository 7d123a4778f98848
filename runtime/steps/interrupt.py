"""Ends what a session does when another thread, or a signal, asks for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ortolan.errors import SessionInterruptedError


class Interrupt:
    """A request to stop, which `check` or a run that ends early answers once; any thread may ask."""

    def __init__(self) -> None:
        self._is_asked = False
        self._running: Any = None  # ONNX Runtime's options of the run under way
        self._lock = threading.RLock()  # a signal's handler may ask in the thread that answers

    @property
    def is_asked(self) -> bool:
        """Whether somebody asked, and nobody has answered yet."""
        return self._is_asked

    def ask(self) -> None:
        """Ask; a run on the host that is under way ends at its next node."""
        with self._lock:
            self._is_asked = True
            if self._running is not None:
                self._running.terminate = True

    def check(self) -> None:
        """Answer. Raises SessionInterruptedError where somebody asked."""
        with self._lock:
            asked, self._is_asked = self._is_asked, False
        if asked:
            raise SessionInterruptedError("the session was interrupted; logical_length says how far it has read")

    @contextlib.contextmanager
    def running(self, run_options: Any) -> Iterator[None]:
        """Let whoever asks end the run of the block, which then raises what ONNX Runtime does."""
        with self._lock:
            run_options.terminate = self._is_asked
            self._running = run_options
        try:
            yield
        finally:
            with self._lock:
                self._running = None
