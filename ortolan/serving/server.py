"""Runs the application by uvicorn until a signal comes, and sees to it that what is answered then ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

TICK_SECONDS = 0.1
READING_SECONDS = 1.0  # that clients get to read the end of an answer that was cut short


class Server(uvicorn.Server):
    """A server that takes no more requests once a signal has come, and lets those that run end for some seconds.

    Then, or at a second signal, the engine is closed, so that answers end with its error.

    Attributes:
        signal: the first that came; None: none did.
    """

    def __init__(self, app: ASGIApp, close: Callable[[], None], ending_seconds: float) -> None:
        """Prepare to serve.

        Args:
            app: what answers.
            close: ends all that runs, in another thread.
            ending_seconds: that running requests get to end.
        """
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        self.signal: int | None = None
        self._close, self._ending_seconds = close, ending_seconds
        self._is_cut_short = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal."""
        self._is_cut_short = self.signal is not None
        self.signal = self.signal or sig
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Note signals while the server runs; those that were ignored stay so."""
        if threading.current_thread() is not threading.main_thread():  # others get no signals
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {each: signal.getsignal(each) for each in numbers if signal.getsignal(each) != signal.SIG_IGN}
        for number in before:
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what runs, but not for ever."""
        cutting = asyncio.create_task(self._cut_late())
        await super().shutdown(sockets)
        cutting.cancel()

    async def _cut_late(self) -> None:
        """Close the engine when the time is over, then the connections of clients that do not read."""
        end = time.monotonic() + self._ending_seconds
        while not self._is_cut_short and time.monotonic() < end:
            await asyncio.sleep(TICK_SECONDS)
        await asyncio.to_thread(self._close)
        await asyncio.sleep(READING_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
