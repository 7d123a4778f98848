"""The device's choice of tokens: what NumPy chooses, drawn as often as it is likely."""

import dataclasses
import itertools

import numpy as np
import pytest

from ortolan import Sampling
from ortolan.runtime.cuda import CudaBuffers
from ortolan.runtime.device_loop import TokenChooser
from ortolan.runtime.sampler import distribution, penalize

pytestmark = pytest.mark.cuda

VOCABULARIES = [1, 2, 31, 2049, 50_003, 262_144]
CASES = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t, (k, p, m) in itertools.product(
        (0.7, 1.3), [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (90, 0.8, 0.02)]
    )
]
BATCH, DRAWS = 400, 20


@dataclasses.dataclass
class State:
    """The inputs of a decode step of `batch` sequences."""

    token_ids: object
    positions: object
    past_len: object
    kv_len: object


class Chooser:
    """Chooses for each row of logits [B, V] and brings the tokens back."""

    def __init__(self, logits: np.ndarray) -> None:
        self.device = CudaBuffers(0)
        rows = len(logits)
        self.state = State(
            *(self.device.upload(np.zeros(rows, np.int64)) for _ in range(2)),
            self.device.upload(np.full(rows, 7, np.int32)),
            self.device.upload(np.arange(3 * rows, dtype=np.int32)),
        )
        self.logits = self.device.upload(logits)
        self._chooser = TokenChooser(self.device, self.logits, self.state)
        self._produced = self.device.pinned((rows,), np.int32)

    def start(self, sampling, histories=None) -> None:
        self._chooser.start(sampling, histories or [[]] * len(sampling))

    def choose(self, draw: int = 0, advance_tokens: int = 1) -> np.ndarray:
        self._chooser.choose(self._produced, draw, advance_tokens)
        self.device.synchronize()
        return self._produced.copy()


def draw_logits(rows: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * 3).astype(np.float32)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_greedy_takes_the_first_of_the_largest(vocabulary):
    logits = np.round(draw_logits(3, vocabulary))  # many are equal
    chooser = Chooser(logits)
    chooser.start([Sampling()] * 3)
    np.testing.assert_array_equal(chooser.choose(), logits.argmax(axis=1))


def test_a_choice_moves_the_state_on():
    chooser = Chooser(draw_logits(3, 100))
    chooser.start([Sampling()] * 3)
    chosen = chooser.choose(advance_tokens=0)
    for _ in range(2):
        chooser.choose()
    state = {
        field.name: chooser.device.download(getattr(chooser.state, field.name)) for field in dataclasses.fields(State)
    }
    np.testing.assert_array_equal(state["token_ids"], chosen)
    np.testing.assert_array_equal(state["positions"], [2] * 3)
    np.testing.assert_array_equal(state["past_len"], [9] * 3)
    np.testing.assert_array_equal(state["kv_len"], np.arange(9) + 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_told_and_forgotten(bad, temperature):
    good = draw_logits(2, 5000)
    broken = good.copy()
    broken[1, 4321] = bad
    chooser = Chooser(broken)
    chooser.start([Sampling(temperature=temperature, seed=1)] * 2)
    first = chooser.choose()
    assert first[0] >= 0
    assert first[1] == -1
    chooser.device.write(chooser.logits, good)
    assert (chooser.choose() >= 0).all()


def test_the_penalty_counts_tokens_as_they_are_chosen():
    logits, penalty = draw_logits(2, 300), 3.0
    chooser = Chooser(logits)
    histories = [[5, 9], [int(logits[1].argmax())]]
    chooser.start([Sampling(repetition_penalty=penalty)] * 2, histories)
    for _ in range(12):
        expected = [int(penalize(row, seen, penalty).argmax()) for row, seen in zip(logits, histories, strict=True)]
        assert chooser.choose().tolist() == expected
        for seen, token in zip(histories, expected, strict=True):
            seen.append(token)


@pytest.mark.parametrize("vocabulary", [50, 5003, 128_256])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_distribution(case, vocabulary):
    """Chi-square over the tokens that are expected five times or more; the others count as one."""
    logits = draw_logits(1, vocabulary)
    chooser = Chooser(np.repeat(logits, BATCH, axis=0))
    chooser.start([Sampling(seed=seed, **case) for seed in range(BATCH)])
    drawn = np.concatenate([chooser.choose(draw) for draw in range(DRAWS)])
    expected = distribution(logits[0], Sampling(**case)) * len(drawn)
    assert (expected[drawn] > 0).all()
    counts, often = np.bincount(drawn, minlength=vocabulary), expected >= 5
    seen = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    assert ((seen - wanted) ** 2 / wanted).sum() <= freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("case", [{"temperature": 1.0}, {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01}])
def test_draws_repeat_and_do_not_depend_on_the_batch(case):
    logits = draw_logits(9, 32_000)
    rules = [Sampling(seed=seed, **case) for seed in range(9)]
    together = Chooser(logits)
    together.start(rules)
    rows = [together.choose(draw) for draw in range(20)]
    again = Chooser(logits)
    again.start(rules)
    np.testing.assert_array_equal([again.choose(draw) for draw in range(20)], rows)
    alone = Chooser(logits[4:5])
    alone.start(rules[4:5])
    np.testing.assert_array_equal([alone.choose(draw)[0] for draw in range(20)], [row[4] for row in rows])
    assert len({tuple(column) for column in np.transpose(rows)}) == 9
