"""Says which status and which of OpenAI's error objects an error becomes."""

from __future__ import annotations

import logging
from typing import Any

from ortolan.errors import ContextLengthError, EngineClosedError, OrtolanError, RequestCancelledError
from ortolan.serving.asked import UnknownModelError
from ortolan.serving.fields import FieldError

BAD_REQUEST, UNAUTHORIZED, NOT_FOUND, TOO_LARGE, FAILED, UNAVAILABLE = 400, 401, 404, 413, 500, 503
_log = logging.getLogger("ortolan.serving")


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error: whose fault it is."""
    if isinstance(error, UnknownModelError):
        return NOT_FOUND
    if isinstance(error, EngineClosedError | RequestCancelledError):
        return UNAVAILABLE
    is_callers = isinstance(error, OrtolanError) and isinstance(error, ValueError)
    return BAD_REQUEST if is_callers else FAILED


def describe(error: Exception) -> dict[str, Any]:
    """Return the error's object; errors that nobody expects are logged, and tell no more than that."""
    status = status_of(error)
    message = " ".join(str(error).split()) if isinstance(error, OrtolanError) else "the server failed; its log says why"
    if status == FAILED:
        unexpected = None if isinstance(error, OrtolanError) else error
        _log.error("a request failed: %s", error if unexpected is None else repr(error), exc_info=unexpected)
    code = None
    if isinstance(error, ContextLengthError):
        code = "context_length_exceeded"
    elif isinstance(error, UnknownModelError):
        code = "model_not_found"
    return error_object(status, message, error.param if isinstance(error, FieldError) else None, code)


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error's object with a type by its status."""
    kind = "invalid_request_error" if status < FAILED else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
