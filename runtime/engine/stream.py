"""Carries a request's tokens from the engine's thread to whoever reads them, in a thread or an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

from ortolan.errors import ConfigError, RequestCancelledError, file_path
from ortolan.runtime.generate.logprobs import TokenLogprobs
from ortolan.runtime.generate.turn import Shown
from ortolan.runtime.ownership import Process
from ortolan.runtime.speculation.drafter import SpeculationStats
from ortolan.runtime.text.so_far import TextSoFar


class Outbox:
    """Tokens on their way; one thread puts, any other may take."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # all that were put
        self.logprobs: list[TokenLogprobs] = []  # theirs, where they were asked for
        self.text: str | None = None  # theirs, where a stop is a text
        self.reason: str | None = None
        self.error: Exception | None = None
        self._ready: deque[int] = deque()
        # Entered by itself, not by the condition: an exception of a signal's handler could leave that one locked.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._process = Process()  # in one forked later nobody puts tokens, and the lock may stay locked
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def is_ended(self) -> bool:
        """Whether no token will follow."""
        return self.reason is not None or self.error is not None

    def put(self, shown: Sequence[Shown], text: str | None = None) -> None:
        """Hand tokens over, and the text of all so far where a stop is one."""
        with self._lock:
            if not self.is_ended:
                self.tokens.extend(each.token for each in shown)
                self.logprobs.extend(each.logprobs for each in shown if each.logprobs is not None)
                self.text = text
                self._ready.extend(each.token for each in shown)
                self._wake()

    def finish(self, reason: str) -> None:
        """Say that no token follows, and why."""
        with self._lock:
            if not self.is_ended:
                self.reason = reason
                self._wake()

    def fail(self, error: Exception) -> None:
        """Say that the request failed; tokens not taken yet come first. A second end changes nothing."""
        if not self._process.is_here:
            return
        with self._lock:
            if not self.is_ended:
                self.error = error
                self._wake()

    def take(self) -> int | None:
        """Wait for the next token; None at the end. Raises the error that the request failed with."""
        self._process.check("a stream")
        with self._lock:
            while not self._ready and not self.is_ended:
                self._condition.wait()
            return self._next()

    async def take_async(self) -> int | None:
        """Wait as `take` does, without keeping the event loop."""
        self._process.check("a stream")
        while True:
            with self._lock:
                if self._ready or self.is_ended:
                    return self._next()
                loop = asyncio.get_running_loop()
                awake = loop.create_future()
                self._sleepers.append((loop, awake))
            await awake

    def wait(self) -> None:
        """Wait for the end."""
        self._process.check("a stream")
        with self._lock:
            while not self.is_ended:
                self._condition.wait()

    def _next(self) -> int | None:
        if self._ready:
            return self._ready.popleft()
        if self.error is not None:
            raise self.error
        return None

    def _wake(self) -> None:
        self._condition.notify_all()
        for loop, awake in self._sleepers:
            with contextlib.suppress(RuntimeError):  # the loop was closed; nobody waits there any more
                loop.call_soon_threadsafe(_resolve, awake)
        self._sleepers.clear()


def _resolve(awake: asyncio.Future[None]) -> None:
    if not awake.done():
        awake.set_result(None)


class Stream:
    """The tokens that follow a prompt, as they are chosen. Made by `Engine.submit`.

    A plain or asynchronous loop over it yields token ids, and cancels the request where it is left early, be it by
    `break`, by an exception or because its task was cancelled. `next` takes one token and cancels nothing. Every
    token is yielded once, to whoever asks first.
    """

    def __init__(
        self,
        outbox: Outbox,
        prompt_tokens: int,
        text: TextSoFar,
        cancel: Callable[[], None],
        save: Callable[[Path], None],
        speculation: SpeculationStats | None,
    ) -> None:
        self._outbox, self._text, self._cancel, self._save = outbox, text, cancel, save
        self._speculation = speculation
        self.prompt_tokens = prompt_tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far, whether they were yielded or not."""
        return tuple(self._outbox.tokens)

    @property
    def text(self) -> str | None:
        """The text so far, in whole characters with their spaces; None where the model has no tokenizer.

        It is that of `tokens`, and of what comes before a stop text in its first token. Behind `Engine.restore` it
        begins where the saved generation did. Tokens are decoded when this is read, in the thread that reads it.
        """
        if self._outbox.text is not None:
            return self._outbox.text
        is_last, tokens = self._outbox.reason is not None, self._outbox.tokens
        return self._text.read(tokens, len(tokens), is_last=is_last)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """How likely each of `tokens` was, where `submit` was asked for log-probabilities; else empty."""
        return tuple(self._outbox.logprobs)

    @property
    def speculation(self) -> SpeculationStats | None:
        """What became of drafts so far; None where the request has no speculation."""
        return self._speculation

    @property
    def finish_reason(self) -> str | None:
        """Why the tokens ended, "eos", "stop", "length" or "context"; None before, and after an error."""
        return self._outbox.reason

    @property
    def error(self) -> Exception | None:
        """The error that the request failed with."""
        return self._outbox.error

    @property
    def done(self) -> bool:
        """Whether no token will follow."""
        return self._outbox.is_ended

    def save(self, path: str | Path) -> None:
        """Write the request's sequence to a file between two steps; the request goes on.

        `Engine.restore` and `Model.restore` go on from it as this request does.

        Raises:
            ConfigError: the request has ended, has read nothing yet or evicts and has not read all of its prompt, or no
                file can have that name or may be made there.
            StorageError: the disk is full, or writing failed otherwise; `path` is what it was before.
            EngineClosedError: the engine is closed.
        """
        file = file_path("path", path)
        if self._outbox.is_ended:
            raise ConfigError("a request can be saved while it runs; this one has ended")
        self._save(file)

    def cancel(self) -> None:
        """End the request; its pages are free before the next step. A reader who goes on gets RequestCancelledError."""
        self._outbox.fail(RequestCancelledError("the request was cancelled"))
        self._cancel()

    def result(self) -> list[int]:
        """Wait for the end, and return all tokens. Raises the error that the request failed with."""
        self._outbox.wait()
        if self._outbox.error is not None:
            raise self._outbox.error
        return list(self._outbox.tokens)

    def __next__(self) -> int:
        token = self._outbox.take()
        if token is None:
            raise StopIteration
        return token

    def __iter__(self) -> Iterator[int]:
        try:
            while (token := self._outbox.take()) is not None:
                yield token
        finally:
            self._cancel_unless_done()

    async def __anext__(self) -> int:
        token = await self._outbox.take_async()
        if token is None:
            raise StopAsyncIteration
        return token

    async def __aiter__(self) -> AsyncIterator[int]:
        try:
            while (token := await self._outbox.take_async()) is not None:
                yield token
        finally:
            self._cancel_unless_done()

    def _cancel_unless_done(self) -> None:
        if not self._outbox.is_ended:
            self.cancel()
