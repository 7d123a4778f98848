"""Sends many mixed requests through an engine on the shipped model, and compares each with a session of its own.

    python benchmarks/engine_soak.py --requests 2000

Requests differ in length, eviction policy and the moment of their cancel; several threads submit them. Afterwards no
byte of the page pools may be held, and every request must have the tokens that a session gives it alone, except where
the two best logits are closer than rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import ortolan
from ortolan.errors import OrtolanError, RequestCancelledError

MAX_CONTEXT = 768
CHUNK_SIZE = 128
PAGE_SIZE = 16
LONGEST_PROMPT = 720
MOST_NEW = 40
SEQUENCES = 32
POLICIES = ("snapkv", "streaming", "pyramidkv", "adakv", "kvzip")
AGAIN = {"kvzip": {"piece": 40, "lead": 8}}  # which fit behind the longest prompt, and so are those of sessions
TIE = 1e-3  # of the logits' range; choices closer than that may fall either way in another batch


@dataclass(slots=True)
class Job:
    """One request, and what came of it."""

    prompt: list[int]
    max_new_tokens: int
    snapkv: ortolan.Eviction | None
    cancel_after: int | None  # tokens
    tokens: list[int] = field(default_factory=list)
    outcome: str = "none"


def make_jobs(count: int, seed: int, vocabulary: int) -> list[Job]:
    """Draw requests: most are short, a third generates much, two in five may evict, a seventh is cancelled."""
    rng = np.random.default_rng(seed)
    jobs = []
    for _ in range(count):
        length = 1 + int(rng.beta(1, 3) * (LONGEST_PROMPT - 1))
        new = int(rng.integers(1, MOST_NEW + 1))
        if rng.random() < 1 / 3:
            length, new = 1 + length // 40, new * 8  # pages run out while such requests decode
        snapkv = None
        if rng.random() < 2 / 5:
            policy = POLICIES[rng.integers(len(POLICIES))]
            budget = int(rng.choice([48, 80, 128]))
            snapkv = ortolan.Eviction(budget=budget, window=32, policy=policy, **AGAIN.get(policy, {}))
        cancel = int(rng.integers(0, new)) if rng.random() < 1 / 7 else None
        jobs.append(Job(rng.integers(0, vocabulary, length).tolist(), new, snapkv, cancel))
    return jobs


def serve(engine: ortolan.Engine, jobs: Sequence[Job], threads: int, in_flight: int) -> None:
    """Send all jobs through the engine; each thread has up to `in_flight` under way."""

    def work(mine: list[Job]) -> None:
        for begin in range(0, len(mine), in_flight):
            group = mine[begin : begin + in_flight]
            streams = [engine.submit(j.prompt, j.max_new_tokens, snapkv=j.snapkv, ignore_eos=True) for j in group]
            for job, stream in zip(group, streams, strict=True):
                read(job, stream)

    workers = [threading.Thread(target=work, args=(list(jobs[i::threads]),)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def read(job: Job, stream: Any) -> None:
    """Read a stream to its end, or cancel it on the way."""
    try:
        if job.cancel_after == 0:
            stream.cancel()
        for token in stream:
            job.tokens.append(token)
            if len(job.tokens) == job.cancel_after:
                stream.cancel()
        job.outcome = str(stream.finish_reason)
    except RequestCancelledError:
        job.outcome = "cancelled"
    except OrtolanError as error:
        job.outcome = f"{type(error).__name__}: {error}"


def find_difference(model: ortolan.Model, job: Job, sessions: dict[Any, ortolan.Session]) -> str | None:
    """Say where a job's tokens differ from those of a session, except after a tie.

    The session is fed the job's own tokens, so that one choice that fell otherwise does not hide the next. Sessions are
    kept by their eviction, and emptied before they are used again.
    """
    if job.snapkv not in sessions:
        sessions[job.snapkv] = model.session(MAX_CONTEXT, CHUNK_SIZE, job.snapkv)
    session = sessions[job.snapkv]
    session.rewind(0)
    logits = session.prefill(job.prompt)
    for index, token in enumerate(job.tokens):
        best = int(np.argmax(logits))
        if token != best and logits[best] - logits[token] > TIE * np.ptp(logits):
            return f"token {index} is {token}, alone {best}, {logits[best] - logits[token]:.2g} better"
        if index + 1 < len(job.tokens):
            logits = session.step(token)
    return None


def run(model: ortolan.Model, count: int, seed: int, *, check: int | None = None) -> dict[str, Any]:
    """Run a soak; returns its figures, with every difference found.

    Args:
        model: the shipped one, paged.
        count: requests.
        seed: of the requests.
        check: how many are compared with sessions; None compares all.
    """
    jobs = make_jobs(count, seed, model.manifest.vocab_size)
    plan = model.plan_engine(SEQUENCES, None, CHUNK_SIZE, MAX_CONTEXT)
    shares = {kind: 1.0 if kind.grows else SEQUENCES / 2 for kind in plan.kinds}  # full attention: pages must run out
    budget = int(sum(n * kind.pages_for(MAX_CONTEXT) * kind.page_bytes for kind, n in shares.items()))
    start = time.perf_counter()
    with ortolan.Engine(model, SEQUENCES, budget, CHUNK_SIZE, max_context=MAX_CONTEXT, overcommit=4.0) as engine:
        before = engine.memory()
        serve(engine, jobs, threads=4, in_flight=12)
        after, stats = engine.memory(), engine.stats()
    seconds = time.perf_counter() - start
    sessions: dict[Any, ortolan.Session] = {}
    checked = [(i, find_difference(model, job, sessions)) for i, job in enumerate(jobs[:check])]
    return {
        "requests": count,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(stats.fed_tokens / seconds),
        "outcomes": {o: sum(job.outcome == o for job in jobs) for o in sorted({job.outcome for job in jobs})},
        "unfinished": [i for i, j in enumerate(jobs) if j.outcome == "length" and len(j.tokens) != j.max_new_tokens],
        "differences": {i: text for i, text in checked if text},
        "compared_tokens": sum(len(job.tokens) for job in jobs[:check]),
        "memory_before": vars_of(before),
        "memory_after": vars_of(after),
        "stats": vars_of(stats),
    }


def vars_of(record: Any) -> dict[str, int]:
    """Return the fields of a dataclass with slots."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def is_sound(report: dict[str, Any]) -> bool:
    """Say whether a soak found nothing wrong."""
    outcomes = set(report["outcomes"]) <= {"length", "cancelled"}
    before, after = report["memory_before"], report["memory_after"]
    unheld = after["kept_bytes"] + after["free_bytes"]
    clean = unheld == after["pool_bytes"] == before["pool_bytes"] and not after["held_bytes"]
    return outcomes and clean and not report["differences"] and not report["unfinished"]


def main() -> int:
    """Run the soak that the command line describes."""
    from ortolan.retrieval import shipped_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", type=int, help="compare only that many with sessions of their own")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = ortolan.export(
            shipped_model(), Path(root) / "m", max_context=MAX_CONTEXT, chunk_size=CHUNK_SIZE, paged=True,
            page_size=PAGE_SIZE,
        )  # fmt: skip
        model = ortolan.load(folder, device=options.device)
        report = run(model, options.requests, options.seed, check=options.check)
    print(json.dumps(report, indent=2))
    return 0 if is_sound(report) else 1


if __name__ == "__main__":
    sys.exit(main())
