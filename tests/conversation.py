"""Random turns of one session, and what it should consist of afterwards."""

from __future__ import annotations

import random

import numpy as np

from ortolan.errors import CapacityError

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
