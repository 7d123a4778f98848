"""Sessions on the host and on a device of NumPy arrays, and random turns that two sessions take alike."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from fake_cuda import on_fake_cuda

import ortolan
from ortolan.errors import CapacityError
from ortolan.runtime.caches import plan

DEVICES = ("host", "device")


def place(model: ortolan.Model, device: str, monkeypatch: pytest.MonkeyPatch) -> ortolan.Model:
    """Return a model that was loaded for the CPU as one whose sessions are on the host or on the stand-in device."""
    monkeypatch.setattr(plan, "CUDA_GROWTH_ROOM", 20)  # so that caches shrink and grow within a short context
    return on_fake_cuda(model, monkeypatch) if device == "device" else model


def with_manifest(model: ortolan.Model, **changes: object) -> ortolan.Model:
    """Return the model with another manifest, over the same graph."""
    changed, manifest = copy.copy(model), dataclasses.replace(model.manifest, **changes)
    changed.manifest, changed.decoder = manifest, dataclasses.replace(model.decoder, manifest=manifest)
    vars(changed).pop("fingerprint", None)  # it is kept once it was asked for
    return changed


def with_end_tokens(model: ortolan.Model, tokens: Sequence[int] = ()) -> ortolan.Model:
    """Return the model with other end-of-sequence tokens; random weights may choose its own at any time."""
    return with_manifest(model, eos_token_ids=tuple(tokens))


def evicted_session(model: ortolan.Model, tokens: list[int]) -> ortolan.Session:
    """Open a session that has read and evicted a prompt, with a generation under way."""
    session = model.session(snapkv=ortolan.SnapKv(budget=40, window=8, sink=2))
    next(session.generate(tokens, 8))
    return session


def random_turn(rng: random.Random, *, rewinds: bool):
    """Draw a turn; it can be taken by several sessions, and returns what came of it."""
    tokens = [rng.randint(3, 130) for _ in range(rng.choice([1, 2, 9, 20, 45]))]
    sampling = ortolan.Sampling(temperature=rng.choice([0.0, 1.2]), repetition_penalty=1.3, seed=rng.randint(0, 99))
    taken, distance = rng.randint(1, 8), rng.choice([1, 7, 25])

    def prefill(session):
        return session.prefill(tokens)

    def step(session):
        return np.array([session.step(token) for token in tokens])

    def generate(session):
        return list(itertools.islice(session.generate(tokens, 8, sampling), taken))

    def rewind(session):
        session.rewind(max(0, session.logical_length - distance))

    return rng.choice([prefill, step, generate, *([rewind] if rewinds else [])])


def outcome(turn, session):
    """Take a turn; returns its result, or the refusal's kind."""
    try:
        return turn(session)
    except CapacityError as error:
        return str(error).partition(":")[0]


def assert_same(session, other) -> None:
    """Assert that two sessions have read the same and hold as much."""
    assert session.logical_length == other.logical_length
    assert session.state.history == other.state.history
    assert session.finish_reason == other.finish_reason
    for layer in range(len(session.plan.layers)):
        assert session.physical_length(layer) == other.physical_length(layer)
        np.testing.assert_equal(session.kept_positions(layer), other.kept_positions(layer))
