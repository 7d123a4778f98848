"""Sessions on the host and on a device of NumPy arrays, and random turns that two sessions take alike."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from fake_cuda import TOTAL_BYTES, FakeChooser, FakeCuda

import ortolan
from ortolan.errors import CapacityError
from ortolan.runtime import device_session, plan
from ortolan.runtime.device_session import DeviceModel

DEVICES = ("host", "device")


def place(model: ortolan.Model, device: str, monkeypatch: pytest.MonkeyPatch) -> ortolan.Model:
    """Let a model that was loaded for the CPU make its next sessions on the host or on the stand-in device."""
    monkeypatch.setattr(device_session, "TokenChooser", FakeChooser)
    monkeypatch.setattr(plan, "CUDA_GROWTH_ROOM", 20)  # so that caches shrink and grow within a short context
    shared = DeviceModel(FakeCuda(), itertools.count(1), TOTAL_BYTES, 0) if device == "device" else None
    monkeypatch.setattr(model, "_device", shared)
    return model


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
    assert session._history == other._history
    assert session.finish_reason == other.finish_reason
    for layer in range(len(session.plan.layers)):
        assert session.physical_length(layer) == other.physical_length(layer)
        np.testing.assert_equal(session.kept_positions(layer), other.kept_positions(layer))
