"""Random turns, rewinds and evictions leave a session as if only what was not taken back had ever been read."""

import dataclasses
import random

import numpy as np
import pytest
from fake_cuda import make_session
from parity import relative_difference
from tolerances import LOGITS_RELATIVE

from ortolan import SnapKv
from ortolan.errors import CapacityError
from ortolan.runtime.options import POLICIES

LONGEST = 350  # tokens, within the models' context


class Conversation:
    """A session under test, and the turns of which it should consist: (is a prompt, its tokens)."""

    def __init__(self, session, rng: random.Random) -> None:
        self.session, self.rng = session, rng
        self.turns: list[tuple[bool, list[int]]] = []

    def draw(self, *lengths: int) -> list[int]:
        return [self.rng.randint(3, 130) for _ in range(self.rng.choice(lengths))]

    def prefill(self) -> np.ndarray:
        tokens = self.draw(1, 3, 9, 20, 60)
        self.turns.append((True, tokens))
        return self.session.prefill(tokens)

    def step(self) -> np.ndarray:
        tokens = self.draw(1, 2, 10, 25)
        self.turns += [(False, [token]) for token in tokens]
        return [self.session.step(token) for token in tokens][-1]

    def generate(self) -> np.ndarray:
        """Generate, leave early or not, and go on; the last token taken is fed with what comes next."""
        prompt, following = self.draw(1, 3, 9, 40), self.draw(1, 2, 12)
        stream = self.session.generate(prompt, 8)
        taken = [next(stream) for _ in range(self.rng.randint(1, 8))]
        self.turns += [(True, prompt), *((False, [token]) for token in taken[:-1])]
        if self.rng.random() < 0.5:
            stream.close()
        if self.rng.random() < 0.5:
            self.turns.append((True, [taken[-1], *following]))
            return self.session.prefill(following)
        self.turns += [(False, taken[-1:]), (False, following[:1])]
        return self.session.step(following[0])

    def rewind(self) -> None:
        length = self.session.logical_length
        length = self.rng.randint(max(0, length - self.rng.choice((2, 15, 40))), length)
        try:
            self.session.rewind(length)
        except CapacityError:
            return
        kept, begin = [], 0
        for is_prompt, tokens in self.turns:
            if begin < length:
                kept.append((is_prompt, tokens[: length - begin]))
            begin += len(tokens)
        self.turns = kept

    def replay(self, session) -> np.ndarray:
        """Read the turns that are left with a fresh session; returns its last logits."""
        rows = [session.prefill(t) if is_prompt else session.step(t[0]) for is_prompt, t in self.turns]
        return rows[-1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("device", ["host", "device"])
@pytest.mark.parametrize("seed", range(12))
def test_what_was_taken_back_leaves_no_trace(request, monkeypatch, seed, device, policy):
    rng = random.Random(seed)
    model = request.getfixturevalue(rng.choice(["full_model", "mixed_model"]))
    monkeypatch.setattr(model, "manifest", dataclasses.replace(model.manifest, eos_token_ids=()))
    snapkv = SnapKv(budget=rng.choice([24, 40]), window=8, sink=2, policy=policy)
    session = make_session(model, monkeypatch, snapkv=snapkv) if device == "device" else model.session(snapkv=snapkv)
    session.plan = dataclasses.replace(session.plan, growth_room=rng.choice([5, 20, 60]))
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
