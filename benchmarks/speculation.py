"""Times generation with drafts against generation without, by turns in one run.

    python benchmarks/speculation.py MODEL_DIR --device cpu --threads 2 --json speculation.json

Each line is a ratio: tokens per second with drafts over tokens per second without, the median of the rounds' ratios.
 - lookup: `PromptLookup` behind a document whose second copy breaks off in the middle (the model's own text, where it
   has a tokenizer of bytes, else random tokens). How much is gained depends on how far the model copies.
 - mtp: the model's own head, where it has one.
 - oracle: a drafter that knows the tokens, each of which it gets right with the given probability.
 - wrong: a drafter whose tokens are all wrong: what speculation costs where it gains nothing.
With --sequences above 1 an engine runs that many requests at once; the model folder must be paged then.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ortolan
from ortolan import Sampling, Speculation

Tokens = list[int]


class OracleDrafter:
    """Proposes the tokens that follow, each right with some probability."""

    def __init__(self, right: Sequence[Tokens], share: float, vocab_size: int) -> None:
        self._right, self._share, self._vocab_size = right, share, vocab_size
        self._random = np.random.default_rng(0)

    def propose(self, tokens: Sequence[int], count: int, sampling: Sampling) -> Tokens:
        """Return the tokens that follow the sequence that ends as the given one does."""
        length = len(tokens)
        whole = next((each for each in self._right if each[length - 8 : length] == tokens[-8:]), [])
        draft = whole[length : length + count]
        wrong = self._random.random(len(draft)) >= self._share
        return [(token + int(bad)) % self._vocab_size for token, bad in zip(draft, wrong, strict=True)]

    def is_likely(self, tokens: Sequence[int], known: int) -> bool:
        """Say yes."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle(Speculation):
    """An `OracleDrafter` of known sequences, prompts included."""

    right: tuple[tuple[int, ...], ...]
    share: float

    def open(self, model: ortolan.Model, max_context: int) -> OracleDrafter:
        """Make the drafter."""
        return OracleDrafter([list(each) for each in self.right], self.share, model.manifest.vocab_size)


class Runner:
    """Generates with sessions, or an engine of several sequences."""

    def __init__(self, model: ortolan.Model, prompts: list[Tokens], new_tokens: int) -> None:
        self._model, self._prompts, self._new_tokens = model, prompts, new_tokens
        self._context = max(map(len, prompts)) + new_tokens
        object.__setattr__(model.manifest, "eos_token_ids", ())  # random weights may choose one at any time
        self._engine = None
        if len(prompts) > 1:
            self._engine = ortolan.Engine(model, len(prompts), max_context=self._context)

    def run(self, speculation: Speculation | None) -> tuple[float, list[Tokens], float | None]:
        """Return the tokens per second behind the first one, the tokens, and those of a step that checked a draft."""
        if self._engine is None:
            return self._run_session(speculation)
        streams = [self._engine.submit(p, self._new_tokens, speculation=speculation) for p in self._prompts]
        for stream in streams:
            next(stream)
        start, before = time.perf_counter(), sum(len(stream.tokens) for stream in streams)
        results = [stream.result() for stream in streams]
        seconds = time.perf_counter() - start
        checked = streams[0].speculation
        rate = (sum(map(len, results)) - before) / seconds
        return rate, results, checked.tokens_per_check if checked else None

    def _run_session(self, speculation: Speculation | None) -> tuple[float, list[Tokens], float | None]:
        session = self._model.session(self._context)
        generation = session.generate(self._prompts[0], self._new_tokens, speculation=speculation)
        first = next(generation)
        start = time.perf_counter()
        tokens = [first, *generation]
        rate = (len(tokens) - 1) / (time.perf_counter() - start)
        checked = generation.speculation
        return rate, [tokens], checked.tokens_per_check if checked else None


def make_prompts(model: ortolan.Model, count: int, length: int) -> list[Tokens]:
    """Return prompts of a text, and of its first half once more; their beginnings differ."""
    prompts = []
    for index in range(count):
        half = length * 2 // 3
        rng = np.random.default_rng(index)
        tokens = rng.integers(3, model.manifest.vocab_size, half).tolist()
        try:
            source = inspect.getsource(inspect)[5000 + 2000 * index :]
            tokens = model.tokenizer.encode(source, add_special_tokens=False)[:half]
        except ortolan.ContractMismatchError:  # no tokenizer
            pass
        prompts.append([*tokens, *tokens[: length - half]])
    return prompts


def compare(runner: Runner, cases: dict[str, Speculation], rounds: int) -> list[dict[str, Any]]:
    """Time each case and no speculation by turns."""
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    plain, per_check, same = [], dict[str, float | None](), dict[str, bool]()
    for _ in range(rounds):
        for name, speculation in cases.items():
            base, expected, _ = runner.run(None)
            rate, tokens, per_check[name] = runner.run(speculation)
            same[name] = tokens == expected
            plain.append(base)
            ratios[name].append(rate / base)
    return [
        {
            "case": name,
            "ratio": statistics.median(values),
            "tokens_per_check": per_check[name],
            "same_tokens": same[name],
            "tokens_per_second_without": statistics.median(plain),
        }
        for name, values in ratios.items()
    ]


def main() -> None:
    """Parse the command line, and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--new-tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4, help="most tokens of the drafts of head and oracle")
    parser.add_argument("--share", type=float, default=0.7, help="of the oracle's right tokens")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = ortolan.load(options.model_dir, options.device, num_threads=options.threads)
    prompts = make_prompts(model, options.sequences, options.prompt_tokens)
    runner = Runner(model, prompts, options.new_tokens)
    _, results, _ = runner.run(None)
    right = tuple((*prompt, *tokens) for prompt, tokens in zip(prompts, results, strict=True))
    cases: dict[str, Speculation] = {
        "lookup of 4": ortolan.PromptLookup(tokens=4),
        "lookup of 8": ortolan.PromptLookup(tokens=8, longest=8),
        "lookup of 15": ortolan.PromptLookup(tokens=15, longest=8),
        **({f"mtp of {options.tokens}": ortolan.MtpHead(tokens=options.tokens)} if model.manifest.draft_head else {}),
        f"oracle of {options.tokens}, {options.share:.0%} right": Oracle(
            tokens=options.tokens, right=right, share=options.share
        ),
        "wrong": Oracle(tokens=options.tokens, right=right, share=0.0),
    }
    for speculation in (*cases.values(), *cases.values()):  # graphs are captured, and pages touched
        runner.run(speculation)
    report = compare(runner, cases, options.rounds)
    machine = {"device": model.device.name, "machine": platform.processor() or platform.machine()}
    print(f"{options.model_dir} on {machine['device']}, {len(prompts)} sequences, ortolan {ortolan.__version__}")
    for line in report:
        print(
            f"{line['case']:28} {line['ratio']:5.2f} times {line['tokens_per_second_without']:.0f} tokens/s; "
            f"{line['tokens_per_check'] or 0:.2f} tokens a check; same tokens: {line['same_tokens']}"
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "results": report}, indent=2) + "\n")


if __name__ == "__main__":
    main()
