"""Asks the shipped model one prompt under every eviction policy, and records which values come back."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from quality_tasks import Trial

import ortolan
from ortolan.errors import ConfigError
from ortolan.policies import POLICIES
from ortolan.policies.base import POOLS
from ortolan.retrieval import VALUE_DIGITS, Fact

MODES = ("known", "later")
FULL = "full"
CHUNK_SIZE = 512
SPARE_TOKENS = 256  # room for the answers, and for naming what is asked for again


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured at each prompt.

    Attributes:
        policies: names of `policy_options`.
        removed: shares of the prompt that are removed, 0 .. 1 exclusive.
        modes: "known" (the eviction sees the question), "later" (it comes in a second turn).
        window: last queries that score.
    """

    policies: tuple[str, ...]
    removed: tuple[float, ...]
    modes: tuple[str, ...] = MODES
    window: int = 64

    def snapkv(self, policy: str, removed: float, length: int) -> ortolan.Eviction | None:
        """Return a policy's options for a prompt of `length` tokens; None for full caches."""
        if policy == FULL:
            return None
        options: dict[str, Any] = policy_options()[policy]
        return ortolan.Eviction(budget=round(length * (1 - removed)), window=self.window, **options)

    def check(self, lengths: Sequence[int]) -> None:
        """Raise ConfigError where a share leaves less of a length than is always kept."""
        for share in self.removed:
            if not 0.0 < share < 1.0:
                raise ConfigError(f"removed is {share}; it must lie between 0 and 1")
            for length in lengths:
                self.snapkv(self.policies[0], share, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One answered prompt.

    Attributes:
        mode, policy, removed: how it was asked; removed is 0 for full caches.
        length, kind, seed: which prompt.
        depths: where each value asked for stands, as a share of the text.
        right: for each value asked for, whether it came back.
        covered: for each value asked for, whether sinks and the latest tokens alone would hold it.
        held: tokens held after the prompt, the mean over full-attention layers and kv heads.
    """

    mode: str
    policy: str
    removed: float
    length: int
    kind: str
    seed: int
    depths: tuple[float, ...]
    right: tuple[bool, ...]
    covered: tuple[bool, ...]
    held: float


def policy_options() -> dict[str, dict[str, str]]:
    """Map the names of what can be measured to eviction options: every policy, SnapKV once for each pooling."""
    named: dict[str, dict[str, str]] = {}
    for policy in POLICIES:
        if policy == "snapkv":
            named |= {f"snapkv {pool}": {"policy": policy, "pool": pool} for pool in POOLS}
        else:
            named[policy] = {"policy": policy}
    return named


def measure_batch(folder: Path, settings: Settings, trials: Sequence[Trial]) -> list[Outcome]:
    """Ask prompts of one model folder; on one core, so that several batches may run side by side."""
    model = ortolan.load(folder, device="cpu", num_threads=1)
    return [outcome for trial in trials for outcome in measure(model, settings, trial)]


def measure(model: ortolan.Model, settings: Settings, trial: Trial) -> Iterator[Outcome]:
    """Ask one prompt in every mode with full caches, and with each policy at each share removed."""
    named = [(FULL, 0.0), *((policy, share) for policy in settings.policies for share in settings.removed)]
    with tempfile.TemporaryDirectory() as folder:
        for mode in settings.modes:
            for policy, removed in named:
                snapkv = settings.snapkv(policy, removed, trial.task.length)
                rows = max(snapkv.captured_queries, settings.window) if snapkv else settings.window
                path = Path(folder) / f"{rows}.session"
                if not path.exists():
                    read_text(model, trial, settings.window, rows).save(path)
                right, held = ask(model, model.restore(path, eviction=snapkv), trial, mode)
                yield Outcome(
                    mode=mode,
                    policy=policy,
                    removed=removed,
                    length=trial.task.length,
                    kind=trial.task.kind,
                    seed=trial.task.seed,
                    depths=trial.depths,
                    right=right,
                    covered=trial.covered(snapkv.budget, snapkv.sink) if snapkv else (True,) * len(right),
                    held=held,
                )


def read_text(model: ortolan.Model, trial: Trial, window: int, rows: int) -> ortolan.Session:
    """Read a trial's text but for its last byte, capturing `rows` queries and evicting nothing.

    Reading is what costs here, and it is the same for every policy until an eviction, so that one reading is saved, and
    restored with each policy's options; without any, it goes on without evicting.
    """
    context = trial.task.length + SPARE_TOKENS
    options = ortolan.Eviction(budget=context, window=window)
    if rows != window:
        options = ortolan.Eviction(policy="expected", budget=context, window=window, queries=rows)
    session = model.session(context, CHUNK_SIZE, options)
    session.prefill(model.tokenizer.encode(trial.text[:-1]))
    return session


def ask(model: ortolan.Model, session: ortolan.Session, trial: Trial, mode: str) -> tuple[tuple[bool, ...], float]:
    """Finish a trial's prompt and read the answers.

    The eviction fires after the text ("later") and after the question. The last question's value follows directly. The
    names of the other values are then fed as decoded tokens, which evict nothing: as if the model listed them.

    Returns:
        For each fact asked for whether its value came back; tokens held after the prompt.
    """
    last = trial.text[-1:]
    if mode == "later":
        session.prefill(model.tokenizer.encode(last))
        last = ""
    logits = session.prefill(model.tokenizer.encode(last + trial.question))
    held = held_tokens(session)
    right = {}
    for index, fact in enumerate((trial.asked[-1], *trial.asked[:-1])):
        if index:
            for token in model.tokenizer.encode(fact.question):
                logits = session.step(token)
        right[fact] = says_value(model, session, logits, fact)
    return tuple(right[fact] for fact in trial.asked), held


def says_value(model: ortolan.Model, session: ortolan.Session, logits: Any, fact: Fact) -> bool:
    """Tell whether greedy decoding says the fact's value and ends the number there."""
    said = [int(np.argmax(logits))]
    while len(said) <= VALUE_DIGITS:
        said.append(int(np.argmax(session.step(said[-1]))))
    text = model.tokenizer.decode(said)
    return text.startswith(fact.value) and not text[VALUE_DIGITS : VALUE_DIGITS + 1].isdigit()


def held_tokens(session: ortolan.Session) -> float:
    """Return the tokens that full-attention caches hold, the mean over their layers and kv heads."""
    counts = []
    for layer, plan in enumerate(session.plan.layers):
        if plan.kind != "ring":
            kept = session.kept_positions(layer)
            counts.append(session.physical_length(layer) if kept is None else (kept >= 0).sum() / len(kept))
    return float(np.mean(counts))
