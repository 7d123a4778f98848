"""Training sequences: text with many facts in it, and all of them asked for at the end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ortolan.retrieval import ATTRIBUTES, VALUE_DIGITS, Corpus, Fact, draw_facts, hide, load_corpus

PAD, BOS, EOS = 256, 257, 258
QUESTION_TAIL = 5  # the bytes "? A: " that end a question
SUPERVISED_QUESTIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of the curriculum.

    Attributes:
        tokens: length of a sequence.
        batch: sequences in a batch.
        steps: optimizer steps.
    """

    tokens: int
    batch: int
    steps: int

    @classmethod
    def parse(cls, text: str) -> Stage:
        """Read "tokens:batch:steps"."""
        tokens, batch, steps = (int(part) for part in text.split(":"))
        return cls(tokens=tokens, batch=batch, steps=steps)

    @property
    def max_facts(self) -> int:
        """Facts that a sequence holds at most; each costs about 66 bytes, hidden and asked for."""
        return min(32, self.tokens // 85)


@dataclass(frozen=True, slots=True)
class Batch:
    """Arrays of one batch; row r of sequence b should attend to position target[b, r].

    Attributes:
        tokens: [B, T + 1] int64, the last column is only predicted.
        answer_weight: [B, T] float32, 1 where the next token belongs to an answer, else 0.
        rows: [B, R] int64, positions whose attention is supervised.
        targets: [B, R] int64, where they should look.
    """

    tokens: torch.Tensor
    answer_weight: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the batch on another device."""
        fields = (self.tokens, self.answer_weight, self.rows, self.targets)
        return Batch(*(field.to(device) for field in fields))


class RetrievalStream(torch.utils.data.IterableDataset[Batch]):
    """An endless stream of batches; each worker draws from its own seed."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage = stage
        self.seed = seed

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed}/{self.stage.tokens}/{worker.id if worker else 0}")
        corpus = load_corpus("train")
        while True:
            yield make_batch(rng, corpus, self.stage)


def make_batch(rng: random.Random, corpus: Corpus, stage: Stage) -> Batch:
    """Stack `stage.batch` random sequences."""
    columns = zip(*(make_sequence(rng, corpus, stage) for _ in range(stage.batch)), strict=True)
    return Batch(*(torch.from_numpy(np.stack(column)) for column in columns))


def make_sequence(
    rng: random.Random, corpus: Corpus, stage: Stage
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """Make one sequence: text with facts, then a question and its answer for each fact, in random order."""
    facts = _draw(rng, rng.randint(1, rng.choice((1, 4, stage.max_facts))))
    asked = rng.sample(range(len(facts)), len(facts))
    length = stage.tokens + 1
    tail = sum(len(fact.question) + VALUE_DIGITS + 2 for fact in facts) - len(facts) + 1
    filler = length - tail - sum(len(fact.line) for fact in facts)
    text, starts = hide(corpus.lines(rng, filler), facts, [rng.random() for _ in facts])

    tokens = np.full(length, EOS, np.int64)
    tokens[: len(text)] = np.frombuffer(text.encode("ascii"), np.uint8)
    weight = np.zeros(length, np.float32)
    cursor = len(text)
    rows, targets = [], []
    for order, index in enumerate(asked):
        fact = facts[index]
        question = fact.question if order == 0 else fact.question.removeprefix("\n")
        block = (question + fact.value + "\n").encode("ascii")
        tokens[cursor : cursor + len(block)] = np.frombuffer(block, np.uint8)
        answer = cursor + len(question)
        weight[answer - 1 : answer + VALUE_DIGITS + 1] = 1.0  # the digits, the newline, the end
        value = starts[index] + fact.line.index(fact.value)
        rows.append(_supervised_rows(answer))
        targets.append(_supervised_targets(value))
        cursor += len(block) + 1
    chosen = rng.choices(range(len(rows)), k=SUPERVISED_QUESTIONS)
    return (
        tokens,
        weight[:-1],
        np.concatenate([rows[index] for index in chosen]),
        np.concatenate([targets[index] for index in chosen]),
    )


def _draw(rng: random.Random, count: int) -> list[Fact]:
    """Draw facts whose keys are all different, or shared by several attributes."""
    shared = rng.choice((1, 1, 2, 4))
    facts = draw_facts(rng, -(-count // shared), ATTRIBUTES)
    if shared == 1:
        facts = [rng.choice(facts[start : start + 4]) for start in range(0, len(facts), 4)]
    return rng.sample(facts, count)


def _supervised_rows(answer: int) -> NDArray[np.int64]:
    """Positions of the question's last five bytes and of the value's first four digits."""
    return np.arange(answer - QUESTION_TAIL, answer + VALUE_DIGITS - 1)


def _supervised_targets(value: int) -> NDArray[np.int64]:
    """Where those look: the question's last byte and the digits look at the digit to say next.

    The four bytes before look at the second to fifth digit, so that the question as a whole has looked at
    every digit before the answer starts. An eviction that scores keys by the question's attention keeps them.
    """
    digits = value + np.arange(VALUE_DIGITS)
    return np.concatenate([digits[1:], digits])
