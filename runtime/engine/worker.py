"""The thread that runs an engine's steps."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ortolan.errors import EngineClosedError, OrtolanError, RequestCancelledError
from ortolan.runtime.engine.core import EngineCore
from ortolan.runtime.engine.request import Request
from ortolan.runtime.ownership import Process

Answer = TypeVar("Answer")


class Worker:
    """The thread that runs a core's steps; others reach the core by sending it functions to call."""

    def __init__(self, core: EngineCore) -> None:
        self._calls: deque[Callable[[EngineCore], object]] = deque()
        self._lock = threading.RLock()  # reentrant: a stream may be collected anywhere
        self._condition = threading.Condition(self._lock)  # entering the lock itself lets no signal in between
        self._closed = ""  # why, once it is
        self._stopping = False
        self._core: EngineCore | None = core
        self._process = Process()
        self._thread = threading.Thread(target=self._work, name="ortolan-engine", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise EngineClosedError where no function can be sent any more, or ForkedProcessError."""
        self._process.check("an engine")
        if self._closed or self._stopping:
            raise EngineClosedError(self._closed or "the engine is closed")

    def send(self, call: Callable[[EngineCore], object]) -> None:
        """Let the thread call a function before its next step. Raises as `check`."""
        with self._lock:
            self.check()
            self._calls.append(call)
            self._condition.notify()

    def cancel(self, request: Request) -> None:
        """End a request, unless it or the engine has ended, or the engine is another process's."""
        if not self._process.is_here:
            return
        with self._lock:
            if not self._closed and not self._stopping:
                self.send(lambda core: core.cancel(request, RequestCancelledError("the request was cancelled")))

    def ask(self, call: Callable[[EngineCore], Answer]) -> Answer:
        """Let the thread call a function, and return what it returns.

        Raises:
            EngineClosedError: the engine is closed.
            OrtolanError: the function raised it.
        """
        answers: deque[Answer] = deque()
        errors: deque[OrtolanError] = deque()
        unanswered = threading.Lock()  # an event's own lock could be left to an exception of a signal's handler
        unanswered.acquire()

        def answer(core: EngineCore) -> None:
            try:
                answers.append(call(core))
            except OrtolanError as error:
                errors.append(error)
            unanswered.release()

        self.send(answer)
        while not unanswered.acquire(timeout=1.0):
            if not self._thread.is_alive() and unanswered.locked():
                raise EngineClosedError(self._closed or "the engine is closed")
        if errors:
            raise errors.popleft()
        return answers.popleft()

    def stop(self) -> None:
        """End all requests and the thread; in a process forked later, where there is none, nothing."""
        if not self._process.is_here:
            return
        with self._lock:
            self._stopping = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        core = self._core
        assert core is not None
        closed, error = "the engine is closed", EngineClosedError("the engine was closed before the request ended")
        try:
            while self._take_calls(core):
                core.step()
        except BaseException as failure:  # whatever it is, every reader must learn of it
            closed = f"the engine is closed, as it failed: {failure!r}"
            error = EngineClosedError(f"the engine failed: {failure!r}")
            error.__cause__ = failure
        with self._lock:
            self._closed = closed
            while self._calls:
                with contextlib.suppress(BaseException):  # one that fails keeps no reader from learning of the end
                    self._calls.popleft()(core)
            core.cancel_all(error)
            self._core = None
        with contextlib.suppress(OrtolanError):  # a device that failed has told every reader already
            core.close()

    def _take_calls(self, core: EngineCore) -> bool:
        """Run the functions sent, waiting for some where there is nothing else to do; False: stop."""
        with self._lock:
            while not (self._calls or self._stopping or core.is_busy):
                self._condition.wait()
            if self._stopping:
                return False
        while self._calls:
            self._calls.popleft()(core)
        return True
