"""Answers a file of requests in OpenAI's batch format, a JSON object per line, and goes on where it was left.

Source: the file formats of OpenAI's Batch API.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortolan.errors import ConfigError, EngineClosedError, RequestCancelledError, StorageError
from ortolan.serving.asked import READERS
from ortolan.serving.failures import describe, status_of
from ortolan.serving.fields import FieldError, Fields
from ortolan.serving.service import Service

OK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One request of a file."""

    custom_id: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The requests of a file.

    Attributes:
        lines: in the file's order.
        digest: of the file, as hexadecimal digits.
    """

    lines: tuple[Line, ...]
    digest: str


def read_batch(path: Path) -> Batch:
    """Read a file of requests.

    Raises:
        ConfigError: it cannot be read, has no lines, or a line is not a request; the message has its number.
    """
    try:
        content = path.read_bytes()
        texts = content.decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    lines: dict[str, Line] = {}
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = _read_line(text)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if line.custom_id in lines:
            raise ConfigError(f"{path}, line {number}: custom_id {line.custom_id!r} is that of an earlier line")
        lines[line.custom_id] = line
    if not lines:
        raise ConfigError(f"{path} has no requests; give one JSON object per line")
    return Batch(lines=tuple(lines.values()), digest=hashlib.sha256(content).hexdigest())


def _read_line(text: str) -> Line:
    fields = Fields.of_json(text.encode())
    custom_id, method, path = fields.text("custom_id"), fields.text("method"), fields.text("url")
    body = fields.object("body")
    if not custom_id:
        raise FieldError("custom_id must be a text that names the request")
    if method not in (None, "POST"):
        raise FieldError(f"method is {method!r}; it must be POST")
    if path not in READERS:
        raise FieldError(f"url is {path!r}; allowed: {', '.join(READERS)}")
    fields.end(())
    return Line(custom_id=custom_id, path=path, body=body)


class Results:
    """The file of results while it grows, beside the one that it will be; closing keeps it for the next time."""

    def __init__(self, target: Path, batch: Batch) -> None:
        self._target = target
        self._path = target.with_name(f".{target.name}.{batch.digest[:16]}.part")
        try:
            self._file = open(self._path, "a+b")  # noqa: SIM115
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror or error}") from error
        self.statuses = self._read()

    def _read(self) -> dict[str, int]:
        """Return the statuses of the requests that have results, and drop a last line that was cut off."""
        self._file.seek(0)
        statuses: dict[str, int] = {}
        whole = 0
        for line in self._file:
            try:
                result = json.loads(line)
                statuses[result["custom_id"]] = result["response"]["status_code"]
            except (ValueError, TypeError, KeyError):
                break
            if not line.endswith(b"\n"):
                break
            whole += len(line)
        self._file.truncate(whole)
        return statuses

    def add(self, line: Line, status: int, body: dict[str, Any]) -> None:
        """Write one result. Raises StorageError."""
        number = secrets.token_hex(12)
        result = {
            "id": f"batch_req_{number}",
            "custom_id": line.custom_id,
            "response": {"status_code": status, "request_id": f"req_{number}", "body": body},
            "error": None,
        }
        try:
            self._file.write(json.dumps(result).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror or error}") from error
        self.statuses[line.custom_id] = status

    def finish(self) -> None:
        """Give the file its name. Raises StorageError."""
        self.close()
        try:
            os.replace(self._path, self._target)
        except OSError as error:
            raise StorageError(f"{self._target} cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        """Leave what there is."""
        self._file.close()


async def answer_lines(
    service: Service, lines: Sequence[Line], results: Results, at_once: int, progress: Callable[[], object]
) -> None:
    """Answer requests, so many at once, and add each result as it comes.

    What a request itself asks for wrongly becomes its result. Calls `progress` after each.

    Raises:
        EngineClosedError: the engine has failed as a whole.
        StorageError: a result cannot be written.
    """
    waiting = iter(lines)

    async def answer_some() -> None:
        for line in waiting:
            results.add(line, *await _answer(service, line))
            progress()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, len(lines))):
            group.create_task(answer_some())


async def _answer(service: Service, line: Line) -> tuple[int, dict[str, Any]]:
    try:
        if line.body.get("stream"):
            raise FieldError("a file of results has no streams; leave stream out", "stream")
        answer = await service.begin(line.path, Fields(line.body))
        return OK, await answer.whole()
    except (EngineClosedError, RequestCancelledError):
        raise
    except Exception as error:
        return status_of(error), describe(error)
