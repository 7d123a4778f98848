"""Measures what eviction keeps: retrieval by the shipped model with full, scored and recent-only caches.

Run it with the package installed: `python benchmarks/retrieval.py --samples 66`. Prints right answers by length and by
depth and, with --json, writes the counts. "recent" keeps the last tokens without scoring; its prediction is the share
of prompts whose fact lies in what it keeps. --checkpoint measures another model of examples/train_retriever.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import onnxruntime
from intervals import wilson_interval

import ortolan
from ortolan.cli.table import format_table
from ortolan.retrieval import KINDS, Sample, Task, is_correct, load_corpus, make_sample, shipped_model

ANSWER_TOKENS = 8
REDUCTION = 8
DEPTHS = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Right answers of one policy at one length."""

    length: int
    policy: str
    right: int
    samples: int
    predicted: float | None
    right_by_depth: tuple[int, ...]


def draw_samples(length: int, count: int) -> list[Sample]:
    """Draw prompts over all depths and kinds, from files that training did not see."""
    corpus = load_corpus("eval")
    return [
        make_sample(
            corpus,
            Task(
                length=length, depth=(i % DEPTHS) / (DEPTHS - 1), kind=KINDS[i // DEPTHS % len(KINDS)], seed=50_000 + i
            ),
        )
        for i in range(count)
    ]


def count_right(model: ortolan.Model, samples: list[Sample], snapkv: ortolan.SnapKv | None) -> tuple[int, ...]:
    """Answer every prompt in a fresh session; returns the right answers of each depth."""
    right = [0] * DEPTHS
    for index, sample in enumerate(samples):
        session = model.session(len(sample.prompt) + ANSWER_TOKENS, snapkv=snapkv)
        tokens = list(session.generate(model.tokenizer.encode(sample.prompt), ANSWER_TOKENS))
        right[index % DEPTHS] += is_correct(sample, model.tokenizer.decode(tokens))
    return tuple(right)


def measure(model: ortolan.Model, length: int, count: int) -> list[Result]:
    """Measure the three policies at one length."""
    samples, budget = draw_samples(length, count), length // REDUCTION
    held = sum(sample.needle_start >= length - budget for sample in samples) / count
    policies: list[tuple[str, ortolan.SnapKv | None, float | None]] = [
        ("full cache", None, None),
        (f"SnapKV, {budget} kept", ortolan.SnapKv(budget=budget), None),
        (f"recent, {budget} kept", ortolan.SnapKv(budget=budget, window=budget, sink=0), held),
    ]
    return [
        Result(
            length=length,
            policy=name,
            right=sum(right),
            samples=count,
            predicted=predicted,
            right_by_depth=right,
        )
        for name, snapkv, predicted in policies
        for right in [count_right(model, samples, snapkv)]
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=shipped_model(), help="default: the shipped model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--samples", type=int, default=66, help="prompts for each length (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = max(options.lengths) + ANSWER_TOKENS
        path = ortolan.export(options.checkpoint, Path(folder) / "model", max_context=context, chunk_size=512)
        model = ortolan.load(path, device="cpu")
        results = [r for length in options.lengths for r in measure(model, length, options.samples)]
    print(f"{platform.machine()}, onnxruntime {onnxruntime.__version__}, ortolan {ortolan.__version__}\n")
    rows = [
        [
            str(r.length),
            r.policy,
            f"{100 * r.right / r.samples:.1f}",
            "{:.1f} .. {:.1f}".format(*(100 * bound for bound in wilson_interval(r.right, r.samples))),
            "" if r.predicted is None else f"{100 * r.predicted:.1f}",
        ]
        for r in results
    ]
    print(format_table(["bytes", "policy", "right, %", "95 % interval", "predicted, %"], rows))
    print(f"\nright at each depth, of {options.samples} / {DEPTHS}\n")
    depths = [f"{i / (DEPTHS - 1):.1f}" for i in range(DEPTHS)]
    print(
        format_table(
            ["bytes", "policy", *depths], [[str(r.length), r.policy, *map(str, r.right_by_depth)] for r in results]
        )
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
