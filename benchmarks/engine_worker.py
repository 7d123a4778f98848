"""Serves many sequences with one engine on a GPU for engine_cuda.py: a line of JSON in, a line of JSON out.

python engine_worker.py ortolan MODEL_FOLDER '{"max_context": 8192, "chunk_tokens": 2048, "max_sequences": 64}'
python engine_worker.py genai MODEL_FOLDER '{...}'          (one batch, all prompts of one length)
python engine_worker.py genai-engine MODEL_FOLDER '{...}'   (its continuous batching, on a paged model)
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from typing import Any

import numpy as np
import onnxruntime

Report = dict[str, Any]


def draw_prompt(seed: int, count: int, vocab_size: int) -> list[int]:
    """Draw a prompt."""
    drawn: list[int] = np.random.default_rng(seed).integers(3, vocab_size, count).tolist()
    return drawn


class Trace:
    """When the tokens of each request of a mixed run came."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.firsts: list[float] = []
        self.gaps: list[float] = []
        self.prompt_tokens = self.generated_tokens = 0

    def note(self, begun: float, times: list[float], prompt_tokens: int) -> None:
        """Take note of a request that began at a time, and of when its tokens came."""
        self.firsts.append(times[0] - begun)
        self.gaps += np.diff(times).tolist()
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += len(times)

    def report(self) -> Report:
        """Summarise: rates over the whole run, and how long tokens were waited for."""
        seconds = time.perf_counter() - self.start
        p50, p99, longest = np.percentile(self.gaps, [50, 99, 100])
        return {
            "seconds": seconds,
            "generated_per_second": self.generated_tokens / seconds,
            "tokens_per_second": (self.prompt_tokens + self.generated_tokens) / seconds,
            "first_token_seconds": float(np.mean(self.firsts)),
            "gap_ms": {"p50": 1e3 * p50, "p99": 1e3 * p99, "longest": 1e3 * longest},
        }


class OrtolanWorker:
    """Ortolan."""

    def __init__(self, folder: str, settings: dict[str, int]) -> None:
        import ortolan

        self.versions = {"ortolan": ortolan.custom_ops.library_info().version}
        self._model = ortolan.load(folder, device="cuda")
        self._settings = settings
        self._engine: Any = None

    def decode(self, batch: int, context: int, decode: int, vocab_size: int) -> Report:
        """Time decode steps of a whole batch, from the moment when the last prompt is read."""
        engine, chunk = self._open(), self._settings["chunk_tokens"]
        ahead = batch * context // max(1, chunk - batch) + batch  # what the first generates while the last is read
        rates: list[float] = []
        for turn in range(2):  # the first captures graphs
            begun = time.perf_counter()
            prompts = [draw_prompt(1000 * turn + b, context, vocab_size) for b in range(batch)]
            streams = [engine.submit(prompt, ahead + decode + 16, ignore_eos=True) for prompt in prompts]
            next(streams[-1])
            read, start = time.perf_counter() - begun, time.perf_counter()
            before = sum(len(stream.tokens) for stream in streams)
            for _ in range(decode):
                next(streams[-1])
            seconds = time.perf_counter() - start
            rates.append((sum(len(stream.tokens) for stream in streams) - before) / seconds)
            memory = vars_of(engine.memory())
            for stream in streams:
                stream.cancel()
        return {
            "generated_per_second": rates[-1],
            "step_ms": 1e3 * batch / rates[-1],
            "prefill_seconds": read,
            "memory": memory,
        }

    def mixed(self, running: int, requests: int, prompts: list[int], new: int, vocab_size: int) -> Report:
        """Keep `running` requests under way, with prompts of the lengths given in turn, until all are done."""
        engine = self._open()
        warming = [engine.submit(draw_prompt(i, 64, vocab_size), 4 + 2 * i, ignore_eos=True) for i in range(running)]
        for stream in warming:  # they end one after another, so that every batch size is captured
            stream.result()
        trace, jobs = Trace(), deque(enumerate(prompts[i % len(prompts)] for i in range(requests)))

        async def client() -> None:
            while jobs:
                seed, length = jobs.popleft()
                prompt = draw_prompt(seed, length, vocab_size)
                begun, times = time.perf_counter(), []
                async for _ in engine.submit(prompt, new, ignore_eos=True):
                    times.append(time.perf_counter())
                trace.note(begun, times, length)

        async def serve() -> None:
            await asyncio.gather(*(client() for _ in range(running)))

        asyncio.run(serve())
        return trace.report() | {"stats": vars_of(engine.stats())}

    def capacity(self, budget_sequences: int, context: int, vocab_size: int) -> Report:
        """Give the pools what some full-length caches take, and count the sequences that then run at once."""
        import ortolan

        self._close()
        slots = sum(layer.full_length_bytes for layer in self._model.plan(context, 1).layers)
        budget = budget_sequences * slots
        chunk = self._settings["chunk_tokens"]
        count = budget // self._model.plan_engine(1, None, chunk, context).sequence_bytes(context)
        new = min(context // 2, 2 * count * (context // max(1, chunk - count) + 1))  # the first waits for the last
        with ortolan.Engine(self._model, count, budget, chunk, max_context=context) as engine:
            prompts = [draw_prompt(seed, context - new, vocab_size) for seed in range(count)]
            streams = [engine.submit(prompt, new + 1, ignore_eos=True) for prompt in prompts]
            lengths = [len(stream.result()) for stream in streams]
            running = engine.stats().most_running
        return {
            "budget_bytes": budget,
            "full_length_sequences": budget_sequences,
            "running": running,
            "times_as_many": running / budget_sequences,
            "tokens": sum(lengths),
        }

    def _open(self) -> Any:
        import ortolan

        if self._engine is None:
            settings = self._settings
            self._engine = ortolan.Engine(
                self._model, settings["max_sequences"], None, settings["chunk_tokens"],
                max_context=settings["max_context"],
            )  # fmt: skip
        return self._engine

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


class GenaiWorker:
    """onnxruntime-genai's generator, with all prompts in one batch."""

    def __init__(self, folder: str, settings: dict[str, int]) -> None:
        import onnxruntime_genai as genai

        self.versions = {"onnxruntime_genai": genai.__version__}
        self._genai, self._model, self._settings = genai, genai.Model(folder), settings

    def decode(self, batch: int, context: int, decode: int, vocab_size: int) -> Report:
        """Time decode steps of a whole batch after its prompts are read."""
        seconds = read = 0.0
        for turn in range(2):
            prompts = np.array([draw_prompt(1000 * turn + b, context, vocab_size) for b in range(batch)], np.int32)
            parameters = self._genai.GeneratorParams(self._model)
            length = context + decode + 2
            parameters.set_search_options(max_length=length, min_length=length, batch_size=batch, do_sample=False)
            generator = self._genai.Generator(self._model, parameters)
            begun = time.perf_counter()
            generator.append_tokens(prompts)
            generator.generate_next_token()
            generator.get_next_tokens()
            read, start = time.perf_counter() - begun, time.perf_counter()
            for _ in range(decode):
                generator.generate_next_token()
                generator.get_next_tokens()
            seconds = time.perf_counter() - start
        rate = batch * decode / seconds
        return {"generated_per_second": rate, "step_ms": 1e3 * batch / rate, "prefill_seconds": read}


class GenaiEngineWorker:
    """onnxruntime-genai's engine."""

    def __init__(self, folder: str, settings: dict[str, int]) -> None:
        import onnxruntime_genai as genai

        self.versions = {"onnxruntime_genai": genai.__version__}
        self._genai, self._model = genai, genai.Model(folder)
        self._engine = genai.Engine(self._model)
        self._events = self._engine.create_event_buffer(256)
        self._requests: dict[Any, int] = {}

    def decode(self, batch: int, context: int, decode: int, vocab_size: int) -> Report:
        """Time decode steps of a whole batch, from the moment when every prompt is read."""
        rate = read = 0.0
        for turn in range(2):
            begun = time.perf_counter()
            counts = dict.fromkeys(range(batch), 0)
            for b in range(batch):
                self._add(b, draw_prompt(1000 * turn + b, context, vocab_size), decode + batch + 16)
            while min(counts.values()) == 0:
                self._step(counts)
            read, start, before = time.perf_counter() - begun, time.perf_counter(), sum(counts.values())
            target = min(counts.values()) + decode
            while min(counts.values()) < target:
                self._step(counts)
            rate = (sum(counts.values()) - before) / (time.perf_counter() - start)
            while self._requests:
                self._step()
        return {"generated_per_second": rate, "step_ms": 1e3 * batch / rate, "prefill_seconds": read}

    def mixed(self, running: int, requests: int, prompts: list[int], new: int, vocab_size: int) -> Report:
        """Keep `running` requests under way, with prompts of the lengths given in turn, until all are done."""
        trace, jobs = Trace(), deque(enumerate(prompts[i % len(prompts)] for i in range(requests)))
        begun: dict[int, float] = {}
        times: dict[int, list[float]] = {}
        lengths: dict[int, int] = {}
        while jobs or self._requests:
            while jobs and len(times) < running:
                seed, lengths[seed] = jobs.popleft()
                begun[seed], times[seed] = time.perf_counter(), []
                self._add(seed, draw_prompt(seed, lengths[seed], vocab_size), new)
            for done in self._step(times=times):
                trace.note(begun.pop(done), times.pop(done), lengths.pop(done))
        return trace.report()

    def _add(self, name: int, prompt: list[int], new: int) -> None:
        request = self._engine.create_request()
        options = self._genai.TurnOptions(request)
        options.set_do_sample(False)
        options.set_max_generated_tokens(new)
        options.set_min_generated_tokens(new)
        request.begin_turn(np.array(prompt, np.int32), options)
        self._requests[request] = name

    def _step(self, counts: dict[int, int] | None = None, times: dict[int, list[float]] | None = None) -> list[int]:
        """Run one step, and count or time its tokens; returns the names of the requests that are done."""
        kinds, done = self._genai.EngineEventFlags, []
        for event in self._engine.run(self._events):
            flags, name = event.flags.value, self._requests[event.request]
            if flags & kinds.FAILED.value:
                raise RuntimeError(f"request {name} failed: {event.error_code}")
            if flags & kinds.TOKEN.value and counts is not None:
                counts[name] += 1
            if flags & kinds.TOKEN.value and times is not None:
                times[name].append(time.perf_counter())
            if flags & kinds.TURN_FINISHED.value:
                del self._requests[event.request]
                event.request.close()
                done.append(name)
        return done


def vars_of(record: Any) -> dict[str, int]:
    """Return the fields of a dataclass with slots."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def main() -> None:
    """Answer until the input ends; a request that fails is answered with its error."""
    name, folder, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    makers = {"ortolan": OrtolanWorker, "genai": GenaiWorker, "genai-engine": GenaiEngineWorker}
    worker = makers[name](folder, settings)
    print(json.dumps(worker.versions), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("kind"))(**request)
        except Exception as error:  # the peer's kinds of errors are its own
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
