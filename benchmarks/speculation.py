"""Times generation with drafts against generation without, by turns in one run.

    python benchmarks/speculation.py MODEL_DIR --device cpu --threads 2 --json speculation.json

Each line is a ratio: tokens per second with drafts over tokens per second without, the median of the rounds' ratios.
 - lookup: `PromptLookup` behind a document whose second copy breaks off in the middle (the model's own text, where it
   has a tokenizer of bytes, else random tokens). How much is gained depends on how far the model copies.
 - mtp: the model's own head, where it has one; draft: the smaller model of --draft.
 - oracle: a drafter that knows the tokens, each of which it gets right with the given probability.
 - wrong: a drafter whose tokens are all wrong: what speculation costs where it gains nothing.
With --sequences above 1 an engine runs that many requests at once; the model folder must be paged then, and that of
--draft should be.

Beside each ratio stands what is expected at best of a step with a draft: tokens a check, over one step and the drafted
tokens at the drafter's share of the model's weights. A check of several tokens costs more than a step of one, and so do
rounds in which few requests of an engine take part.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import ortolan
from ortolan import Sampling, Speculation
from ortolan.runtime.speculation.drafter import SpeculationStats

Tokens = list[int]


class OracleDrafter:
    """Proposes the tokens that follow, each right with some probability."""

    def __init__(self, right: Sequence[Tokens], share: float, vocab_size: int, rng: random.Random) -> None:
        self._right, self._share, self._vocab_size, self._random = right, share, vocab_size, rng.random

    def propose(self, tokens: Sequence[int], count: int, sampling: Sampling) -> Tokens:
        """Return the tokens that follow the sequence that ends as the given one does."""
        length = len(tokens)
        whole = next((each for each in self._right if each[length - 8 : length] == tokens[-8:]), [])
        draft = whole[length : length + count]
        return [token if self._random() < self._share else (token + 1) % self._vocab_size for token in draft]

    def is_likely(self, tokens: Sequence[int], known: int) -> bool:
        """Say yes."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle(Speculation):
    """An `OracleDrafter` of known sequences, prompts included."""

    right: tuple[tuple[int, ...], ...]
    share: float
    rng: random.Random = field(default_factory=lambda: random.Random(0))  # of all runs, so that luck evens out

    def open(self, model: ortolan.Model, max_context: int) -> OracleDrafter:
        """Make the drafter."""
        return OracleDrafter([list(each) for each in self.right], self.share, model.manifest.vocab_size, self.rng)


@dataclass(frozen=True, slots=True)
class Run:
    """What a run gave.

    Attributes:
        rate: tokens per second behind the first one.
        tokens: of each sequence.
        checks, drafted, accepted: steps with drafts, and their tokens.
    """

    rate: float
    tokens: list[Tokens]
    checks: int = 0
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, rate: float, tokens: list[Tokens], stats: Sequence[SpeculationStats | None]) -> Run:
        """Add the drafts of all sequences up."""
        known = [each for each in stats if each is not None]
        return cls(
            rate,
            tokens,
            checks=sum(each.checks for each in known),
            drafted=sum(each.drafted_tokens for each in known),
            accepted=sum(each.accepted_tokens for each in known),
        )

    @property
    def tokens_per_check(self) -> float | None:
        """Tokens that a step with a draft gave; None where there was none."""
        return (self.checks + self.accepted) / self.checks if self.checks else None

    def expected(self, draft_cost: float) -> float | None:
        """Return the gain of a step with a draft where only drafting costs anything, `draft_cost` of a step a token."""
        gain = self.tokens_per_check
        return None if gain is None else gain / (1 + draft_cost * self.drafted / self.checks)


class Runner:
    """Generates with sessions, or an engine of several sequences."""

    def __init__(
        self, model: ortolan.Model, prompts: list[Tokens], new_tokens: int, clock: Callable[[], float]
    ) -> None:
        self._prompts, self._new_tokens, self._clock = prompts, new_tokens, clock
        object.__setattr__(model.manifest, "eos_token_ids", ())  # random weights may choose one at any time
        context = max(map(len, prompts)) + new_tokens
        self._engine = ortolan.Engine(model, len(prompts), max_context=context) if len(prompts) > 1 else None
        self._session = None if self._engine else model.session(context)  # one, as graphs are captured for each

    def run(self, speculation: Speculation | None) -> Run:
        """Generate behind all prompts, and time what follows the first token of each."""
        if self._engine is None:
            return self._run_session(speculation)
        streams = [self._engine.submit(p, self._new_tokens, speculation=speculation) for p in self._prompts]
        for stream in streams:
            next(stream)
        start, before = self._clock(), sum(len(stream.tokens) for stream in streams)
        results = [stream.result() for stream in streams]
        seconds = self._clock() - start
        rate = (sum(map(len, results)) - before) / seconds
        return Run.of(rate, results, [stream.speculation for stream in streams])

    def _run_session(self, speculation: Speculation | None) -> Run:
        assert self._session is not None
        self._session.rewind(0)
        generation = self._session.generate(self._prompts[0], self._new_tokens, speculation=speculation)
        first = next(generation)
        start = self._clock()
        tokens = [first, *generation]
        rate = (len(tokens) - 1) / (self._clock() - start)
        return Run.of(rate, [tokens], [generation.speculation])


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


def compare(runner: Runner, model: ortolan.Model, cases: dict[str, Speculation], rounds: int) -> list[dict[str, Any]]:
    """Time each case and no speculation by turns."""
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    plain, last, same = [], dict[str, Run](), dict[str, bool]()
    for _ in range(rounds):
        for name, speculation in cases.items():
            base, last[name] = runner.run(None), runner.run(speculation)
            same[name] = last[name].tokens == base.tokens
            plain.append(base.rate)
            ratios[name].append(last[name].rate / base.rate)
    costs = {name: speculation.draft_cost(model) for name, speculation in cases.items()}
    return [
        {
            "case": name,
            "ratio": statistics.median(values),
            "tokens_per_check": last[name].tokens_per_check,
            "draft_cost": costs[name],
            "expected_at_best": last[name].expected(costs[name]),
            "same_tokens": same[name],
            "tokens_per_second_without": statistics.median(plain),
        }
        for name, values in ratios.items()
    ]


def list_cases(
    model: ortolan.Model, options: argparse.Namespace, right: tuple[tuple[int, ...], ...]
) -> dict[str, Speculation]:
    """Return who drafts in each case; `right` are the sequences that the model makes."""
    most = options.tokens
    cases: dict[str, Speculation] = {
        "lookup": ortolan.PromptLookup(),
        "lookup of 4": ortolan.PromptLookup(tokens=4),
        "lookup of 15": ortolan.PromptLookup(tokens=15),
    }
    if options.draft:
        cases[f"draft of {most}"] = ortolan.DraftModel(options.draft, tokens=most)
    if model.manifest.draft_head:
        cases[f"mtp of {most}"] = ortolan.MtpHead(tokens=most)
    cases[f"oracle of {most}, {options.share:.0%} right"] = Oracle(tokens=most, right=right, share=options.share)
    cases["wrong"] = Oracle(tokens=most, right=right, share=0.0)
    return cases


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
    parser.add_argument("--tokens", type=int, default=4, help="most tokens of the drafts of model, head and oracle")
    parser.add_argument("--share", type=float, default=0.7, help="of the oracle's right tokens")
    parser.add_argument("--draft", type=Path, help="model folder of a smaller model")
    parser.add_argument("--processor-time", action="store_true", help="of all threads, for a CPU that others use too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = ortolan.load(options.model_dir, options.device, num_threads=options.threads)
    prompts = make_prompts(model, options.sequences, options.prompt_tokens)
    clock = time.process_time if options.processor_time else time.perf_counter
    runner = Runner(model, prompts, options.new_tokens, clock)
    results = runner.run(None).tokens
    right = tuple((*prompt, *tokens) for prompt, tokens in zip(prompts, results, strict=True))
    cases = list_cases(model, options, right)
    for speculation in (*cases.values(), *cases.values()):  # graphs are captured, and pages touched
        runner.run(speculation)
    report = compare(runner, model, cases, options.rounds)
    machine = {"device": model.device.name, "machine": platform.processor() or platform.machine()}
    print(f"{options.model_dir} on {machine['device']}, {len(prompts)} sequences, ortolan {ortolan.__version__}")
    for line in report:
        print(
            f"{line['case']:28} {line['ratio']:5.2f} times {line['tokens_per_second_without']:.0f} tokens/s; "
            f"{line['tokens_per_check'] or 0:.2f} tokens a check, at best {line['expected_at_best'] or 0:.2f} times "
            f"at {line['draft_cost']:.2f} a token; same tokens: {line['same_tokens']}"
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "results": report}, indent=2) + "\n")


if __name__ == "__main__":
    main()
