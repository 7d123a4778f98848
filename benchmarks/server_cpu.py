"""Measures what the HTTP server costs: tokens per second of its clients' streams, against the engine's alone.

    python benchmarks/server_cpu.py --clients 1 4 16

The shipped model on the CPU, where a step takes a few milliseconds, so that little hides the server's own work. Server
and clients are two processes; the engine alone runs in the clients' process. They take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import onnxruntime

import ortolan
from ortolan.cli.table import format_table
from ortolan.retrieval import Task, load_corpus, make_sample, shipped_model

MAX_CONTEXT, SEQUENCES, CHUNK_TOKENS = 2048, 16, 256
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Run:
    """What clients saw: tokens per second of all together, and the median time to a first piece of text."""

    tokens_per_second: float
    first_seconds: float


async def measure(follow: Callable[[str], Awaitable[float]], prompts: Sequence[str], new_tokens: int) -> Run:
    """Follow all prompts at once; `follow` returns when its first piece came."""
    begin = time.perf_counter()
    firsts = await asyncio.gather(*(follow(prompt) for prompt in prompts))
    seconds = time.perf_counter() - begin
    return Run(len(prompts) * new_tokens / seconds, statistics.median(firsts) - begin)


def through_engine(engine: ortolan.Engine, model: ortolan.Model, prompts: Sequence[str], new_tokens: int) -> Run:
    """Read the engine's streams."""

    async def follow(prompt: str) -> float:
        first, stream = 0.0, engine.submit(model.tokenizer.encode(prompt), new_tokens, ignore_eos=True)
        async for _ in stream:
            first = first or time.perf_counter()
        assert len(stream.tokens) == new_tokens
        return first

    return asyncio.run(measure(follow, prompts, new_tokens))


def through_server(url: str, prompts: Sequence[str], new_tokens: int) -> Run:
    """Read the server's streams."""

    async def every() -> Run:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=limits) as client:

            async def follow(prompt: str) -> float:
                body = {"prompt": prompt, "max_tokens": new_tokens, "ignore_eos": True, "stream": True}
                first = counted = 0
                async with client.stream(
                    "POST", "/completions", json=body | {"stream_options": {"include_usage": True}}
                ) as answer:
                    async for line in answer.aiter_lines():
                        first = first or time.perf_counter()
                        if '"usage": {' in line:
                            counted = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
                assert counted == new_tokens
                return first

            return await measure(follow, prompts, new_tokens)

    return asyncio.run(every())


@contextmanager
def served(folder: str) -> Iterator[str]:
    """Run `ortolan serve`; gives its URL."""
    options = ["--device", "cpu", "--port", "0", "--max-sequences", str(SEQUENCES), "--chunk-tokens", str(CHUNK_TOKENS)]
    command = [sys.executable, "-m", "ortolan", "serve", folder, *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = re.search(r"http://\S+", line := process.stderr.readline())
        if found is None:
            raise SystemExit(line + process.stderr.read())
        yield found[0]
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], help="at once (default: 1 4 16)")
    parser.add_argument("--prompt", type=int, default=512, help="bytes, at least 512 (default: %(default)s)")
    parser.add_argument("--new", type=int, default=128, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="medians are taken of (default: %(default)s)")
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; onnxruntime {onnxruntime.__version__}"
    )
    corpus, rows = load_corpus(), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(ortolan.export(shipped_model(), f"{scratch}/model", max_context=MAX_CONTEXT, paged=True))
        model = ortolan.load(folder, device="cpu")
        with ortolan.Engine(model, SEQUENCES, chunk_tokens=CHUNK_TOKENS) as engine, served(folder) as url:
            for clients in options.clients:
                runs: list[tuple[Run, Run]] = []
                for turn in range(options.turns + 1):
                    texts = [
                        make_sample(corpus, Task(length=options.prompt, seed=turn * clients + each)).prompt
                        for each in range(clients)
                    ]
                    alone = through_engine(engine, model, texts, options.new)
                    runs.append((alone, through_server(url, texts, options.new)))
                rows.append(_row(clients, runs[1:]))
    print(format_table(["clients", "engine, tokens/s", "server", "ratio", "first piece, ms", "server"], rows))
    return 0


def _row(clients: int, runs: Sequence[tuple[Run, Run]]) -> list[str]:
    speeds = [statistics.median(run[way].tokens_per_second for run in runs) for way in (0, 1)]
    firsts = [1000 * statistics.median(run[way].first_seconds for run in runs) for way in (0, 1)]
    ratio = statistics.median(run[1].tokens_per_second / run[0].tokens_per_second for run in runs)
    return [str(clients), *(f"{speed:.0f}" for speed in speeds), f"{ratio:.2f}", *(f"{first:.1f}" for first in firsts)]


if __name__ == "__main__":
    sys.exit(main())
