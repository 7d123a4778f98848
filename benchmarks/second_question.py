"""Measures what reusing an evicted prompt costs: a second question, about another fact of the same text.

Run it with the package installed: `python benchmarks/second_question.py --samples 66`. The shipped model reads a
text with eight facts, answers the question at its end, and is then asked for another of the eight in the same
session, with full caches and with an eighth of them kept by SnapKV and by KVzip.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import onnxruntime

import ortolan
from ortolan.cli.table import format_table
from ortolan.retrieval import Fact, Sample, Task, is_correct, load_corpus, make_sample, shipped_model

ANSWER_TOKENS = 8
TURN_TOKENS = 64  # room for the second question
REDUCTION = 8
FACT = re.compile(r"^# The (\w+) of ([A-Z]{4}) is (\d{5})\.$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Right answers of one policy."""

    policy: str
    first_right: int
    second_right: int
    samples: int


def other_fact(sample: Sample) -> Fact:
    """Return the first fact of the text that the prompt does not ask for."""
    found = (Fact(attribute=a, key=k, value=v) for a, k, v in FACT.findall(sample.prompt))
    return next(fact for fact in found if fact != sample.fact)


def ask_twice(model: ortolan.Model, sample: Sample, eviction: ortolan.Eviction | None) -> tuple[bool, bool]:
    """Answer the prompt's question, then one about another fact, in one session."""
    session = model.session(len(sample.prompt) + 2 * ANSWER_TOKENS + TURN_TOKENS, eviction=eviction)
    other = other_fact(sample)
    right = []
    for text, fact in ((sample.prompt, sample.fact), (other.question, other)):
        tokens = list(session.generate(model.tokenizer.encode(text), ANSWER_TOKENS))
        asked = Sample(prompt=text, answer=fact.value, needle_start=0, fact=fact, task=sample.task)
        right.append(is_correct(asked, model.tokenizer.decode(tokens)))
    return right[0], right[1]


def measure(model: ortolan.Model, policy: str, samples: list[Sample], eviction: ortolan.Eviction | None) -> Result:
    """Count the right answers of one policy."""
    outcomes = [ask_twice(model, sample, eviction) for sample in samples]
    return Result(
        policy=policy,
        first_right=sum(first for first, _ in outcomes),
        second_right=sum(second for _, second in outcomes),
        samples=len(samples),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="bytes of the prompt (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=66, help="prompts (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    corpus, budget = load_corpus("eval"), options.length // REDUCTION
    samples = [
        make_sample(corpus, Task(length=options.length, depth=(i % 11) / 10, kind="multi_key", seed=70_000 + i))
        for i in range(options.samples)
    ]
    with tempfile.TemporaryDirectory() as folder:
        context = options.length + 2 * ANSWER_TOKENS + TURN_TOKENS
        path = ortolan.export(shipped_model(), Path(folder) / "model", max_context=context, chunk_size=512)
        model = ortolan.load(path, device="cpu")
        results = [
            measure(model, "full cache", samples, None),
            measure(model, f"SnapKV, {budget} kept", samples, ortolan.SnapKv(budget=budget)),
            measure(model, f"KVzip, {budget} kept", samples, ortolan.Eviction(policy="kvzip", budget=budget)),
        ]
    print(f"{platform.machine()}, onnxruntime {onnxruntime.__version__}, ortolan {ortolan.__version__}\n")
    rows = [
        [r.policy, f"{100 * r.first_right / r.samples:.1f}", f"{100 * r.second_right / r.samples:.1f}"] for r in results
    ]
    print(format_table(["policy", "first question, %", "second question, %"], rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
