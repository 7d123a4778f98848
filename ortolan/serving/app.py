"""The HTTP server's routes, for any ASGI server: OpenAI's API for completions, chats and models, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from ortolan.serving.asked import READERS, UnknownModelError
from ortolan.serving.failures import TOO_LARGE, UNAUTHORIZED, describe, error_object, status_of
from ortolan.serving.fields import Fields
from ortolan.serving.metrics import render_metrics
from ortolan.serving.service import Answer, Service

BODY_BYTES, BODY_BYTES_PER_TOKEN = 2**20, 32  # of a request, at most: besides, for each token of the context
CLIENT_CLOSED_REQUEST = 499
METRICS_TYPE = "text/plain; version=0.0.4"
_OPEN = ("/health",)  # without a key


def create_app(service: Service, api_key: str | None = None) -> Starlette:
    """Make the application.

    Args:
        service: what answers.
        api_key: that requests must bear; None: none is needed.
    """
    routes = _Routes(service, api_key)
    return Starlette(
        routes=[
            *(Route(path, routes.guarded(routes.complete), methods=["POST"]) for path in READERS),
            Route("/v1/models", routes.guarded(routes.models)),
            Route("/v1/models/{name:path}", routes.guarded(routes.model)),
            Route("/metrics", routes.guarded(routes.metrics)),
            Route("/health", routes.guarded(routes.health)),
        ],
        exception_handlers={HTTPException: _refuse},
    )


class _Routes:
    def __init__(self, service: Service, api_key: str | None) -> None:
        self._service, self._key = service, None if api_key is None else b"Bearer " + os.fsencode(api_key)
        self._most_bytes = BODY_BYTES + BODY_BYTES_PER_TOKEN * service.engine.plan.max_context

    def guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Ask for the key before a handler, and turn what it raises into an answer."""

        async def handle(request: Request) -> Response:
            try:
                if request.url.path not in _OPEN:
                    self._check_key(request)
                return await handler(request)
            except HTTPException:
                raise
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody reads it
            except Exception as error:
                return _Json(describe(error), status_of(error))

        return handle

    async def complete(self, request: Request) -> Response:
        fields = await asyncio.to_thread(Fields.of_json, await self._read(request))
        answer = await self._service.begin(request.url.path, fields)
        if answer.asked.is_streamed:
            return _Events(answer)
        return await asyncio.to_thread(_Json, await _unless_left(request, answer.whole()))

    async def models(self, _: Request) -> Response:
        return _Json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._service.name:
            raise UnknownModelError(f"there is no model {name!r}; this server has {self._service.name!r}", "model")
        return _Json(self._model())

    async def health(self, _: Request) -> Response:
        await asyncio.to_thread(self._service.engine.stats)
        return _Json({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        return Response(await asyncio.to_thread(render_metrics, self._service.engine), media_type=METRICS_TYPE)

    def _model(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "ortolan",
            "max_model_len": service.engine.plan.max_context,
        }

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        if self._key is not None and not secrets.compare_digest(given, self._key):
            challenge = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(UNAUTHORIZED, "the request does not bear this server's key", challenge)

    async def _read(self, request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._most_bytes:
                raise HTTPException(TOO_LARGE, f"the body has more than {self._most_bytes} bytes")
        return bytes(body)


async def _unless_left(request: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Wait for work, which is cancelled where the client goes away. Raises ClientDisconnect."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    done, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((done, watch), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        return done.result()
    finally:
        for each in (done, watch):
            each.cancel()
        await asyncio.wait((done, watch))


async def _events(answer: Answer) -> AsyncGenerator[str]:
    """Yield server-sent events; an error is the last one before the end."""
    try:
        async with contextlib.aclosing(answer.parts()) as parts:
            async for part in parts:
                yield _event(json.dumps(part))
    except Exception as error:
        yield _event(json.dumps(describe(error)))
    yield _event("[DONE]")


def _event(data: str) -> str:
    return f"data: {data}\n\n"


class _Json(JSONResponse):
    """JSON in UTF-8; halves of surrogate pairs, which a request may bring, are escaped."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


class _Events(StreamingResponse):
    """A stream whose answer is closed as soon as nobody reads it any more, or where nobody ever did."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(_events(answer), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answer = answer

    async def stream_response(self, send: Send) -> None:
        with contextlib.closing(self._answer):
            async with contextlib.aclosing(self.body_iterator):  # type: ignore[type-var]
                await super().stream_response(send)


async def _refuse(_: Request, error: Exception) -> Response:
    """Answer in OpenAI's form what the routes themselves refuse."""
    assert isinstance(error, HTTPException)
    return _Json(error_object(error.status_code, error.detail), error.status_code, headers=error.headers)
