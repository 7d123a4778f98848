"""Times what an eviction costs, and what it gives back, on a GPU, in one run.

    python benchmarks/eviction_cuda.py llama-1b qwen3-8b --json eviction.json

Cost: a prompt is read with and without SnapKV by turns. Capturing is the difference of the two readings of a turn;
evicting is everything from the scores to the smaller caches. Gain: decoding behind a long prompt of which the budget
is left, beside decoding behind a prompt as long as the budget without an eviction. Public shapes with random weights,
bfloat16 on CUDA, float32 on the CPU; every reading has a session of its own, and the first turns warm up.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from model_shapes import SHAPES, shape_config

import ortolan
import ortolan.runtime.eviction.evicting as evicting_module

COST_LIMIT = 0.02  # of reading the prompt
DECODE_LIMIT = 1.05
SKIPPED_TOKENS = 16  # after which decoding has captured its graph and found its pace


class GraphClock:
    """Times the eviction graph alone: scores, selection and compaction, with the lists on the host."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._evict = evicting_module.evict
        evicting_module.evict = self  # type: ignore[assignment]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Evict, and note the time."""
        start = time.perf_counter()
        result = self._evict(*arguments, **options)
        self.seconds = time.perf_counter() - start
        return result


def main() -> None:
    """Measure every shape, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of the prompt whose reading is timed")
    parser.add_argument("--context", type=int, default=32768, help="tokens behind which decoding is timed")
    parser.add_argument("--budget", type=int, default=2048, help="tokens kept")
    parser.add_argument("--policy", default="snapkv")
    parser.add_argument("--decode", type=int, default=144, help="tokens decoded")
    parser.add_argument("--repeats", type=int, default=6, help="turns; an even number favours none")
    parser.add_argument("--chunk-size", type=int, default=8192)
    parser.add_argument("--layers", type=int, help="take only so many of a shape's layers")
    parser.add_argument("--work-dir", type=Path, help="keep exports here, and reuse them")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    report: dict[str, Any] = {"device": device_name(options.device), "onnxruntime": onnxruntime.__version__}
    report |= {"library": ortolan.custom_ops.library_info().version, "budget": options.budget, "shapes": {}}
    print(f"{report['device']}, onnxruntime {onnxruntime.__version__}, budget {options.budget}, {options.policy}")
    clock = GraphClock()
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as scratch:
            model = open_model(shape, (options.work_dir or Path(scratch)) / shape, options)
            report["shapes"][shape] = {"cost": cost(model, options, clock), "decode": decode(model, options)}
        print_shape(shape, report["shapes"][shape])
        del model
        gc.collect()
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def open_model(shape: str, work: Path, options: argparse.Namespace) -> ortolan.Model:
    """Export a shape with random weights, once, and open it."""
    work.mkdir(parents=True, exist_ok=True)
    config = shape_config(shape, options.layers)
    (work / "config.json").write_text(json.dumps(config))
    longest = max(options.prompt, options.context, options.budget) + options.decode + 2
    layers = config.get("text_config", config)["num_hidden_layers"]
    sizes = f"{layers}-{longest}-{options.chunk_size}"
    folder = work / f"ortolan-{options.device.partition(':')[0]}-{sizes}"
    if not folder.exists():
        dtype = "float32" if options.device == "cpu" else "bfloat16"
        limits = {"max_context": longest, "chunk_size": options.chunk_size}
        ortolan.export(work, folder, dtype=dtype, weights="random", **limits)
    return ortolan.load(folder, device=options.device)


def cost(model: ortolan.Model, options: argparse.Namespace, clock: GraphClock) -> dict[str, float]:
    """Read a prompt with and without SnapKV by turns; medians in seconds, and the share that SnapKV takes."""
    snapkv = ortolan.Eviction(policy=options.policy, budget=options.budget)
    plain, capturing, graph, evicting = [], [], [], []
    added: dict[int, list[float]] = {0: [], 1: []}  # by capturing, where that reading came first, or second
    for turn in range(options.repeats + 1):
        prompt = draw(model, options.prompt, seed=turn)
        for chosen in (None, snapkv) if turn % 2 else (snapkv, None):  # the second of two finds a warmer device
            session = model.session(options.prompt + 1, options.chunk_size, chosen)
            session.prefill(prompt)
            if turn == 0:
                continue
            reading = session.stats.prefill_seconds
            if chosen is None:
                plain.append(reading)
                continue
            if session.stats.evictions != 1:
                raise SystemExit(f"{options.prompt} tokens are within the budget {options.budget}: nothing is evicted")
            capturing.append(reading)
            graph.append(clock.seconds)
            evicting.append(session.stats.eviction_seconds)
        if turn:
            added[turn % 2].append(capturing[-1] - plain[-1])
    row = {"prefill_seconds": statistics.median(plain), "captured_prefill_seconds": statistics.median(capturing)}
    row |= {"graph_seconds": statistics.median(graph), "eviction_seconds": statistics.median(evicting)}
    capture = statistics.mean(statistics.median(values) for values in added.values() if values)
    return row | {
        "capture_seconds": capture,
        "spread": (max(plain) - min(plain)) / row["prefill_seconds"],
        "share": (capture + row["eviction_seconds"]) / row["prefill_seconds"],
        "graph_share": (max(0.0, capture) + row["graph_seconds"]) / row["prefill_seconds"],
    }


def decode(model: ortolan.Model, options: argparse.Namespace) -> dict[str, float]:
    """Decode behind an evicted long prompt and behind a short one by turns; medians in seconds a token."""
    snapkv = ortolan.Eviction(policy=options.policy, budget=options.budget)
    settings = {"evicted": (options.context, snapkv), "short": (options.budget, None)}
    times: dict[str, list[float]] = {name: [] for name in settings}
    held: dict[str, int] = {}
    for turn in range(options.repeats + 1):
        for name, (length, chosen) in settings.items():
            session = model.session(length + options.decode + 2, options.chunk_size, chosen)
            seconds = token_seconds(session, draw(model, length, seed=turn), options.decode)
            held[f"{name}_cache_bytes"] = session.cache_bytes
            if turn:
                times[name].append(seconds)
    row = {f"{name}_token_seconds": statistics.median(values) for name, values in times.items()}
    return row | held | {"ratio": row["evicted_token_seconds"] / row["short_token_seconds"]}


def token_seconds(session: ortolan.Session, prompt: list[int], count: int) -> float:
    """Return the mean time of a token, once decoding has found its pace."""
    stream: Iterator[int] = session.generate(prompt, count)
    for _ in range(min(SKIPPED_TOKENS, count // 2)):
        next(stream)
    start = time.perf_counter()
    taken = sum(1 for _ in stream)
    if not taken:
        raise SystemExit("the model ended its answer early; its random weights chose an end-of-sequence token")
    return (time.perf_counter() - start) / taken


def draw(model: ortolan.Model, count: int, seed: int) -> list[int]:
    """Draw a prompt."""
    return list(np.random.default_rng(seed).integers(3, model.manifest.vocab_size, count).tolist())


def device_name(device: str) -> str:
    """Name the device as its driver does."""
    if device == "cpu":
        return "cpu"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", f"--id={device.partition(':')[2] or 0}"]
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout.strip()


def print_shape(shape: str, row: dict[str, dict[str, float]]) -> None:
    """Print one shape's figures beside their limits."""
    spent, gained = row["cost"], row["decode"]
    print(
        f"{shape}: prefill {1e3 * spent['prefill_seconds']:.2f} ms (spread {spent['spread']:.1%}), capture "
        f"{1e3 * spent['capture_seconds']:+.2f} ms, score + select + compact {1e3 * spent['graph_seconds']:.2f} ms, "
        f"with smaller caches {1e3 * spent['eviction_seconds']:.2f} ms: {spent['graph_share']:.2%}, in all "
        f"{spent['share']:.2%} of prefill (limit {COST_LIMIT:.0%})"
    )
    print(
        f"{shape}: decode {1e3 * gained['evicted_token_seconds']:.3f} ms a token after an eviction, "
        f"{1e3 * gained['short_token_seconds']:.3f} ms behind a short prompt: ratio {gained['ratio']:.3f} "
        f"(limit {DECODE_LIMIT})"
    )


if __name__ == "__main__":
    main()
