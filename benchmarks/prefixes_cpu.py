"""Measures what an archive of prefixes saves: the time to a first token whose prompt begins with what was read before.

    python benchmarks/prefixes_cpu.py --tokens 8000

The shipped model on the CPU. The beginning of the prompt is read anew, lies in pages, comes back from host memory, and
comes from the files of another engine; the four take turns, and the text that follows must be the same.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import onnxruntime

import ortolan
from ortolan.cli.table import format_table
from ortolan.retrieval import Task, load_corpus, make_sample, shipped_model

CHUNK_TOKENS, HOST_BYTES, NEW_TOKENS = 512, 2**31, 4
WAYS = ("read anew", "in pages", "in host memory", "in files")


def first_token(engine: ortolan.Engine, prompt: list[int]) -> tuple[float, list[int]]:
    """Return the seconds to the first token of an answer, and the answer."""
    begin = time.perf_counter()
    stream = engine.submit(prompt, NEW_TOKENS, ignore_eos=True)
    next(stream)
    return time.perf_counter() - begin, stream.result()


def measure(model: ortolan.Model, prompts: list[list[int]], folder: Path) -> list[float]:
    """Measure all ways with the first prompt; the others push its pages out."""
    options = {"max_sequences": 2, "chunk_tokens": CHUNK_TOKENS, "disk_cache": folder}
    size = 2 * model.plan_engine(2, None, CHUNK_TOKENS).sequence_bytes(len(prompts[0]) + CHUNK_TOKENS)
    seconds, answers = [], []

    def note(engine: ortolan.Engine) -> None:
        taken, answer = first_token(engine, prompts[0])
        seconds.append(taken)
        answers.append(answer)

    with ortolan.Engine(model, max_cache_bytes=size, host_cache_bytes=HOST_BYTES, **options) as engine:
        note(engine)
        note(engine)
        for other in prompts[1:]:
            first_token(engine, other)
        note(engine)
    with ortolan.Engine(model, max_cache_bytes=size, **options) as engine:
        note(engine)
        if engine.stats().restored_pages == 0:
            raise SystemExit("the files were not read")
    if any(answer != answers[0] for answer in answers):
        raise SystemExit(f"answers differ: {answers}")
    return seconds


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000, help="of each prompt, at least 512 (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="medians are taken of (default: %(default)s)")
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores; onnxruntime {onnxruntime.__version__}")
    corpus, runs = load_corpus(), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = ortolan.export(shipped_model(), f"{scratch}/model", max_context=2 * options.tokens, paged=True)
        model = ortolan.load(folder, device="cpu")
        for turn in range(options.turns):
            samples = [make_sample(corpus, Task(length=options.tokens, seed=4 * turn + each)) for each in range(3)]
            prompts = [model.tokenizer.encode(sample.prompt) for sample in samples]
            runs.append(measure(model, prompts, Path(scratch) / f"files {turn}"))
    medians = [statistics.median(run[way] for run in runs) for way in range(len(WAYS))]
    ratios = [statistics.median(run[0] / run[way] for run in runs) for way in range(len(WAYS))]
    rows = [[name, f"{1000 * m:.1f}", f"{r:.1f}"] for name, m, r in zip(WAYS, medians, ratios, strict=True)]
    print(format_table(["the prompt's beginning", "first token, ms", "times as fast"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
