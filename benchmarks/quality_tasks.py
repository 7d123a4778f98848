"""Makes the prompts of the quality benchmark: RULER's retrieval tasks in the shipped model's format.

RULER hides "needles", pairs of a key and a value, in a long text. Here a needle is a line that the shipped model was
trained on, `# The passkey of QKZD is 48213.`, between lines of Python sources that its training did not see.

Source: RULER (arXiv 2404.06654), section 3 and appendix B: single, multi-keys and multi-values retrieval.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ortolan.errors import ConfigError
from ortolan.retrieval import ATTRIBUTES, Corpus, Fact, check_kind_and_depth, draw_facts, hide

DEPTHS = tuple(step / 10 for step in range(11))
KEYS = 8  # of multi_key: one asked for, seven distractors
FIRST_SEED = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTask:
    """What to ask for.

    Attributes:
        length: bytes of the prompt: text and question.
        depth: where the first fact asked for stands, as a share of the text: 0.0 (start) to 1.0 (end).
        kind: "single" (one fact), "multi_key" (eight keys, one is asked for) or "multi_value" (two keys with four
            values each; `values` of one key's are asked for at once, and all must come back).
        values: of multi_value: how many are asked for, 2 .. 4.
        seed: picks text, keys and values; the same task always gives the same trial.

    Raises:
        ConfigError: a value is not one of these.
    """

    length: int
    depth: float
    kind: str
    values: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        check_kind_and_depth(self.kind, self.depth)
        if not 2 <= self.values <= len(ATTRIBUTES):
            raise ConfigError(f"values is {self.values}; it must lie in 2 .. {len(ATTRIBUTES)}")
        if self.length < 1024:
            raise ConfigError(f"length is {self.length} bytes; facts, question and text need at least 1024")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One prompt, what it asks for, and where that stands.

    Attributes:
        text: what an eviction sees in both modes; ASCII.
        asked: the facts asked for, in the order in which the question states them.
        starts: byte offset of each one's line in the text.
        task: what was asked for.
    """

    text: str
    asked: tuple[Fact, ...]
    starts: tuple[int, ...]
    task: TrialTask

    @property
    def question(self) -> str:
        """What follows the text: one question for each fact asked for; the last one's value follows directly."""
        return "".join(fact.question for fact in self.asked)

    @property
    def depths(self) -> tuple[float, ...]:
        """Where each fact asked for stands, as a share of the text."""
        return tuple(start / len(self.text) for start in self.starts)

    def covered(self, budget: int, sink: int) -> tuple[bool, ...]:
        """Tell for each fact asked for whether the first `sink` and the latest tokens, `budget` in all, hold it."""
        first_kept = self.task.length - (budget - sink)
        return tuple(start >= first_kept for start in self.starts)


def make_trial(corpus: Corpus, task: TrialTask) -> Trial:
    """Make one prompt.

    The first fact drawn stands at the task's depth, all others at random ones; the question names those asked for in
    random order.
    """
    rng = random.Random(f"{task.length}/{task.depth}/{task.kind}/{task.values}/{task.seed}")
    facts = _draw(rng, task.kind)
    asked = _choose(facts, task)
    depths = [task.depth, *(rng.random() for _ in facts[1:])]
    filler = task.length - sum(len(fact.question) for fact in asked) - sum(len(fact.line) for fact in facts)
    text, starts = hide(corpus.lines(rng, filler), facts, depths)
    order = rng.sample(range(len(asked)), len(asked))
    found = dict(zip(facts, starts, strict=True))
    stated = tuple(asked[index] for index in order)
    return Trial(text=text, asked=stated, starts=tuple(found[fact] for fact in stated), task=task)


def _draw(rng: random.Random, kind: str) -> list[Fact]:
    """Draw facts in random order whose values all differ, so that no distractor's is right by chance."""
    keys = {"single": 1, "multi_key": KEYS, "multi_value": 2}[kind]
    while True:
        attributes = ATTRIBUTES if kind == "multi_value" else (rng.choice(ATTRIBUTES),)
        facts = draw_facts(rng, keys, attributes)
        if len({fact.value for fact in facts}) == len(facts):
            rng.shuffle(facts)
            return facts


def _choose(facts: Sequence[Fact], task: TrialTask) -> list[Fact]:
    """Return the facts to ask for: the first, and of multi_value as many of its key as the task says."""
    count = task.values if task.kind == "multi_value" else 1
    return [fact for fact in facts if fact.key == facts[0].key][:count]


def make_trials(corpus: Corpus, length: int, count: int, kinds: Sequence[str], values: int) -> list[Trial]:
    """Make prompts over all depths and kinds: every 11 * len(kinds) of them cover the grid once."""
    return [
        make_trial(
            corpus,
            TrialTask(
                length=length,
                depth=DEPTHS[index % len(DEPTHS)],
                kind=kinds[index // len(DEPTHS) % len(kinds)],
                values=values,
                seed=FIRST_SEED + index,
            ),
        )
        for index in range(count)
    ]
