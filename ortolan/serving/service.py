"""Answers requests by an engine: submits every choice, and follows their texts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ortolan
from ortolan.errors import CapacityError, ConfigError, ContextLengthError
from ortolan.serving.asked import Asked, read
from ortolan.serving.fields import Fields
from ortolan.serving.replies import Piece, Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A model that is served.

    Attributes:
        model: the engine's, with a tokenizer.
        engine: runs all requests.
        name: of the model, in requests and answers.
        max_new_tokens: of an answer in a chat that names no number.
        chat_template: file of the template; None takes the model's own.
        speculation: who drafts for every request; None: nobody.
        created: when the service began, in seconds.
    """

    model: ortolan.Model
    engine: ortolan.Engine
    name: str
    max_new_tokens: int = 1024
    chat_template: Path | None = None
    speculation: ortolan.Speculation | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        """Refuse now what every request would be refused for: a model without a tokenizer, or with bad sampling."""
        _ = self.model.tokenizer, ortolan.Sampling.from_model(self.model)

    async def begin(self, path: str, fields: Fields) -> Answer:
        """Read a request, and submit what it asks for; a cancelled task leaves nothing. Raises OrtolanError."""
        begun = asyncio.ensure_future(asyncio.to_thread(self._begin, path, fields))
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            begun.add_done_callback(_close)
            raise

    def _begin(self, path: str, fields: Fields) -> Answer:
        asked = read(path, fields, self)
        streams: list[ortolan.Stream] = []
        try:
            for prompt in asked.prompts:
                for choice in range(asked.choices):
                    options = asked.options_of(choice)
                    streams.append(self.engine.submit(prompt, speculation=self.speculation, **options))
        except BaseException as error:
            _cancel(streams)
            if isinstance(error, CapacityError) and not isinstance(error, ContextLengthError):
                raise ConfigError(str(error)) from error  # it asks for more than there will ever be
            raise
        return Answer(asked, streams, Reply(asked=asked, model=self.name, tokenizer=self.model.tokenizer))


class Answer:
    """The streams of one request's choices."""

    def __init__(self, asked: Asked, streams: Sequence[ortolan.Stream], reply: Reply) -> None:
        self.asked, self._streams, self._reply = asked, streams, reply

    async def whole(self) -> dict[str, Any]:
        """Wait for all choices, and describe them; a cancelled task cancels them. Raises OrtolanError."""
        choices: list[list[Piece]] = [[] for _ in self._streams]
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                choices[piece.choice].append(piece)
        return await asyncio.to_thread(self._reply.whole, choices, self._completion_tokens())

    async def parts(self) -> AsyncGenerator[dict[str, Any]]:
        """Describe what comes, piece by piece; a generator that is closed cancels what is left. Raises OrtolanError."""
        async with contextlib.aclosing(self._pieces()) as pieces:
            for choice in range(len(self._streams)):
                if (beginning := self._reply.beginning(choice)) is not None:
                    yield beginning
            async for piece in pieces:
                if piece.text or piece.logprobs or piece.finish_reason:
                    yield self._reply.piece(piece)
        if self.asked.has_usage:
            yield self._reply.counts(self._completion_tokens())

    def close(self) -> None:
        """Cancel what is left."""
        _cancel(self._streams)

    def _completion_tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self._streams)

    async def _pieces(self) -> AsyncGenerator[Piece]:
        """Yield the pieces of all choices as they come. Raises the first choice's error that there is."""
        arrived: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(1)  # who reads slowly gets long pieces

        async def follow(choice: int) -> None:
            try:
                async for piece in self._follow(choice):
                    await arrived.put(piece)
                await arrived.put(None)
            except Exception as error:
                await arrived.put(error)

        tasks = [asyncio.create_task(follow(choice)) for choice in range(len(self._streams))]
        try:
            running = len(tasks)
            while running:
                match await arrived.get():
                    case None:
                        running -= 1
                    case Piece() as piece:
                        yield piece
                    case Exception() as error:
                        raise error
        finally:
            for task in tasks:
                task.cancel()
            self.close()

    async def _follow(self, choice: int) -> AsyncGenerator[Piece]:
        """Yield a choice's text as it grows, the echo of its prompt first, and at last why it ended."""
        stream, shown, told, prompt = self._streams[choice], 0, 0, choice // self.asked.choices
        starts = self._reply.starts(self.asked.prompts[prompt]) if self.asked.has_offsets else None
        echo = self.asked.echoed[prompt]
        if echo:
            yield Piece(choice=choice, text=echo)
        while True:
            is_over = await anext(stream, None) is None
            text, logprobs = stream.text or "", stream.logprobs
            yield Piece(
                choice=choice,
                text=text[shown:],
                logprobs=logprobs[told:],
                offsets=[starts(each.token) for each in logprobs[told:]] if starts else (),
                finish_reason=stream.finish_reason if is_over else None,
            )
            shown, told = len(text), len(logprobs)
            if is_over:
                return


def _close(begun: asyncio.Future[Answer]) -> None:
    """Close an answer that nobody waits for, once it has begun."""
    if not begun.cancelled() and begun.exception() is None:
        begun.result().close()


def _cancel(streams: Sequence[ortolan.Stream]) -> None:
    for stream in streams:
        if not stream.done:
            stream.cancel()
