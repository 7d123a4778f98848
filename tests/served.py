"""A server of OpenAI's interface in a thread, over a tiny model whose tokens are bytes."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from byte_tokenizer import write_byte_tokenizer
from families import shared_checkpoint, shared_model
from shared_folders import shared

import ortolan
from ortolan.cli.serve import listen
from ortolan.serving import Service
from ortolan.serving.app import create_app

NAME = "tiny"
MAX_CONTEXT = 512
WAIT_SECONDS = 20
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.name %}={{ m.name | tojson }}{% endif %}\n{% endfor %}"
    "{% if flavour %}{{ flavour }}{% endif %}{{ reasoning_effort }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_folder() -> Path:
    """Export a paged model of 256 tokens with a chat template, which nobody may change."""
    checkpoint = shared_checkpoint("llama", vocab_size=256, num_hidden_layers=2, hidden_size=32)
    exported = shared_model(
        checkpoint, max_context=MAX_CONTEXT, chunk_size=64, paged=True, page_size=16, snapkv_window=8
    )

    def copy(folder: Path) -> None:
        folder.mkdir()
        for file in exported.iterdir():
            (folder / file.name).symlink_to(file)
        write_byte_tokenizer(folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")

    return shared("served model", copy)


def load(folder: Path) -> ortolan.Model:
    return ortolan.load(folder, device="cpu", num_threads=1)


@dataclass(kw_only=True)
class Served:
    """A server under way.

    Attributes:
        service: what it serves.
        port: where, on 127.0.0.1.
        problems: what uvicorn and asyncio have logged, from warnings on.
    """

    service: Service
    port: int
    problems: list[str] = field(default_factory=list)

    @property
    def engine(self) -> ortolan.Engine:
        return self.service.engine

    @property
    def model(self) -> ortolan.Model:
        return self.service.model

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_SECONDS, **options)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT_SECONDS)

    def wait_until_idle(self) -> None:
        """Wait until no request holds pages."""
        wait_until(lambda: self.engine.memory().held_bytes == 0)


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextlib.contextmanager
def tokens_changed(engine: ortolan.Engine, change: Callable[[Sequence[int]], Sequence[int]]) -> Iterator[None]:
    """Let what a step of an engine has chosen, a token for each row, be something else until the block ends."""
    stepper = engine.worker.ask(lambda core: core.stepper)
    run = stepper.run

    def run_and_change(rows: Any) -> Any:
        result = run(rows)
        chosen = change(result.tokens())
        result.tokens = lambda: chosen
        return result

    stepper.run = run_and_change
    try:
        yield
    finally:
        stepper.run = run


@contextlib.contextmanager
def slowed(engine: ortolan.Engine) -> Iterator[None]:
    """Let each step of an engine take so long that nothing is over soon."""

    def wait(tokens: Sequence[int]) -> Sequence[int]:
        time.sleep(0.02)
        return tokens

    with tokens_changed(engine, wait):
        yield


class _Collect(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))


@contextlib.contextmanager
def serving(service: Service, api_key: str | None = None) -> Iterator[Served]:
    """Serve until the block ends; uvicorn and asyncio must have nothing to complain of."""
    with listen("127.0.0.1", 0) as listening:
        served = Served(service=service, port=listening.getsockname()[1])
        handler, loggers = _Collect(served.problems), [logging.getLogger(name) for name in ("uvicorn", "asyncio")]
        for logger in loggers:
            logger.addHandler(handler)
        config = uvicorn.Config(create_app(service, api_key), log_config=None, access_log=False)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.should_exit = True
            thread.join(WAIT_SECONDS)
            for logger in loggers:
                logger.removeHandler(handler)
    assert not thread.is_alive()
    assert served.problems == []


@contextlib.contextmanager
def serving_engine(model: ortolan.Model, *, api_key: str | None = None, **options: Any) -> Iterator[Served]:
    """Serve a model by an engine with these options, until the block ends."""
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(ortolan.Engine(model, **options))
        service = Service(model=model, engine=engine, name=NAME, max_new_tokens=24)
        yield stack.enter_context(serving(service, api_key))
