"""Opens sessions whose caches grow by few slots, and lets their steps fail."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

import ortolan
from ortolan.policies import Eviction
from ortolan.runtime.assembly import make_session
from ortolan.runtime.session import Session
from ortolan.runtime.steps.host import host_result
from ortolan.runtime.steps.row import Row
from ortolan.runtime.steps.stepper import StepResult

DEVICES = ("host", "device")


def open_with_room(
    model: ortolan.Model, growth_room: int, *, snapkv: Eviction | None = None, chunk_size: int | None = None
) -> Session:
    """Open a session whose evicted caches grow by that many slots, so that they do within a short context."""
    plan = dataclasses.replace(model.plan(chunk_size=chunk_size, snapkv=snapkv), growth_room=growth_room)
    return make_session(model, plan, snapkv)


@contextlib.contextmanager
def changed_steps(session: Session, change: Callable[[int, Sequence[Row], StepResult], StepResult]) -> Iterator[None]:
    """Let a function take what each step of a session gave, as (number of the step from 1, rows, result)."""
    stepper, count = session.feeder.stepper, 0
    run = stepper.run

    def run_and_change(rows: Sequence[Row]) -> StepResult:
        nonlocal count
        result = run(rows)
        count += 1
        return change(count, rows, result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepper, "run", run_and_change)
        yield


@contextlib.contextmanager
def failing_step(session: Session, number: int, error: BaseException | type[BaseException]) -> Iterator[None]:
    """Let step `number`, counted from 1, fail after it wrote to the caches."""

    def fail(count: int, rows: Sequence[Row], result: StepResult) -> StepResult:
        if count == number:
            raise error
        return result

    with changed_steps(session, fail):
        yield


@contextlib.contextmanager
def numberless_step(session: Session, number: int, value: float = np.nan) -> Iterator[None]:
    """Let the logits of step `number`, counted from 1, and of all later ones, be no numbers."""

    def spoil(count: int, rows: Sequence[Row], result: StepResult) -> StepResult:
        if count < number:
            return result
        return host_result(rows, np.full((sum(len(row.draws) for row in rows), 131), value, np.float32))

    with changed_steps(session, spoil):
        yield
