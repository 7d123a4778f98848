"""Random turns, rewinds and evictions leave a session as if only what was not taken back had ever been read."""

import random

import numpy as np
import pytest
from conversation import LONGEST, Conversation
from fake_cuda import on_fake_cuda
from parity import relative_difference
from sessions import DEVICES, open_with_room
from tolerances import LOGITS_RELATIVE

from ortolan import Eviction
from ortolan.errors import CapacityError
from ortolan.policies import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(12))
def test_what_was_taken_back_leaves_no_trace(request, monkeypatch, seed, device, policy):
    rng = random.Random(seed)
    model = request.getfixturevalue(rng.choice(["endless_full", "endless_mixed"]))
    snapkv = Eviction(budget=rng.choice([24, 40]), window=8, sink=2, policy=policy)
    placed = on_fake_cuda(model, monkeypatch) if device == "device" else model
    session = open_with_room(placed, rng.choice([5, 20, 60]), snapkv=snapkv)
    talk = Conversation(session, rng)
    for _ in range(rng.randint(3, 14)):
        if session.logical_length > LONGEST:
            break
        action = rng.choice([talk.prefill, talk.step, talk.generate, talk.rewind]) if talk.turns else talk.prefill
        try:
            logits = action()
        except CapacityError:  # the rings lost what an eviction after a rewind must read again; nothing was read
            return
        if logits is None:
            continue
        fresh = model.session(snapkv=snapkv)
        assert relative_difference(logits, talk.replay(fresh)) <= LOGITS_RELATIVE
        assert session.logical_length == fresh.logical_length
        for layer in range(4):
            np.testing.assert_equal(session.kept_positions(layer), fresh.kept_positions(layer))
