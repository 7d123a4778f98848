"""Times one engine on a GPU for model_cuda.py: a line of JSON in, a line of JSON out.

python cuda_worker.py ortolan MODEL_FOLDER MAX_CONTEXT
python cuda_worker.py genai MODEL_FOLDER MAX_CONTEXT
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import onnxruntime

SEGMENT_TOKENS = 16  # decode is timed in segments, since tokens may arrive in bursts


class Engine(Protocol):
    """Continues prompts greedily, each from an empty cache."""

    versions: dict[str, str]

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        """Yield up to `count` tokens after the prompt."""

    def memory(self) -> Any:
        """Say what the engine knows of its memory after the last prompt."""

    def runtime_share(self) -> float | None:
        """Say which part of the decoding so far the GPU did not work on steps."""


class OrtolanEngine:
    """Ortolan."""

    def __init__(self, folder: str, max_context: int, *, batch_invariant: bool = False) -> None:
        import ortolan

        self.versions = {"ortolan": ortolan.custom_ops.library_info().version}
        self._model = ortolan.load(folder, device="cuda", batch_invariant=batch_invariant)
        self._max_context = max_context
        self._session: Any = None

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        """Yield up to `count` tokens after the prompt."""
        if self._session is None:
            self._session = self._model.session(self._max_context)
        self._session.rewind(0)
        yield from self._session.generate(prompt, count)

    def memory(self) -> Any:
        """Return the session's own report."""
        return self._session.memory_report().as_dict()

    def runtime_share(self) -> float | None:
        """Compare the session's clocks, over all prompts."""
        stats = self._session.stats
        return 1 - stats.decode_device_seconds / stats.decode_seconds


class GenaiEngine:
    """onnxruntime-genai."""

    def __init__(self, folder: str, max_context: int) -> None:
        import onnxruntime_genai as genai

        self.versions = {"onnxruntime_genai": genai.__version__}
        self._genai, self._model, self._max_context = genai, genai.Model(folder), max_context

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        """Yield up to `count` tokens after the prompt."""
        parameters = self._genai.GeneratorParams(self._model)
        parameters.set_search_options(max_length=min(len(prompt) + count + 1, self._max_context), do_sample=False)
        generator = self._genai.Generator(self._model, parameters)
        generator.append_tokens(np.array([prompt], np.int32))
        for _ in range(count):
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])
            if generator.is_done():
                return

    def memory(self) -> Any:
        """Nothing is known from inside."""
        return None

    def runtime_share(self) -> float | None:
        """Nothing is known from inside."""
        return None


def run(engine: Engine, prompt_tokens: int, decode: int, repeats: int, vocab_size: int) -> dict[str, Any]:
    """Time the first token and the ones after it, medians over repeats after one to warm up."""
    firsts, later, taken = [], [], []
    for turn in range(repeats + 1):
        prompt = np.random.default_rng(turn).integers(3, vocab_size, prompt_tokens).tolist()
        start = time.perf_counter()
        stream = engine.tokens(prompt, decode + 1)
        taken = [next(stream)]
        first = time.perf_counter() - start
        segments, begin = [], time.perf_counter()
        for token in stream:
            taken.append(token)
            if len(taken) % SEGMENT_TOKENS == 1:
                segments.append((time.perf_counter() - begin) / SEGMENT_TOKENS)
                begin = time.perf_counter()
        if turn:
            firsts.append(first)
            later += segments[1:] or segments
    return {
        "first_token_seconds": statistics.median(firsts),
        "token_seconds": statistics.median(later) if later else None,
        "decoded_tokens": len(taken) - 1,
        "memory": engine.memory(),
        "runtime_share": engine.runtime_share(),
    }


def main() -> None:
    """Answer until the input ends."""
    name, folder, max_context = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    invariant = functools.partial(OrtolanEngine, batch_invariant=True)
    engines: dict[str, Callable[[str, int], Engine]]
    engines = {"ortolan": OrtolanEngine, "invariant": invariant, "genai": GenaiEngine}
    engine = engines[name](folder, max_context)
    print(json.dumps(engine.versions), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(engine, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
