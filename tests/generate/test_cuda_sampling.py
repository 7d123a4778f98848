"""The device's choice of tokens: what the host chooses, drawn as often as it is likely."""

import dataclasses
import itertools

import numpy as np
import pytest
from sampling_reference import assert_follows, distribution, draw_logits

from ortolan import Sampling
from ortolan.runtime.device.cuda import CudaBuffers
from ortolan.runtime.generate import device_library
from ortolan.runtime.generate.device_sampler import DeviceSampler, pack_rules
from ortolan.runtime.generate.draw import BAD, Draw
from ortolan.runtime.generate.sampler import choose, penalize

pytestmark = pytest.mark.cuda

VOCABULARIES = [1, 2, 31, 2049, 50_003, 262_144]
CASES = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t, (k, p, m) in itertools.product(
        (0.7, 1.3), [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (90, 0.8, 0.02)]
    )
]
ROWS, DRAWS = 400, 20
# Share of draws in which last bits of exponentials may decide, where the host's differ from the device's.
UNDECIDED = 1e-2


@dataclasses.dataclass
class State:
    """The inputs of a decode step of `batch` sequences."""

    token_ids: object
    positions: object
    past_len: object
    kv_len: object


class Chooser:
    """Chooses for each row of logits [R, V] and brings the tokens back."""

    def __init__(self, logits: np.ndarray, *, with_state: bool = True) -> None:
        self.device = CudaBuffers(0)
        rows = len(logits)
        self.state = State(
            *(self.device.upload(np.zeros(rows, np.int64)) for _ in range(2)),
            self.device.upload(np.full(rows, 7, np.int32)),
            self.device.upload(np.arange(3 * rows, dtype=np.int32)),
        )
        self.logits = self.device.upload(logits)
        self._sampler = DeviceSampler(self.device, self.logits, self.state if with_state else None)
        self._produced = self.device.pinned((rows,), np.int32)

    def start(self, draws) -> None:
        self._sampler.start(draws)

    def choose(self, advance_tokens: int = 1) -> np.ndarray:
        self._sampler.choose(self._produced, advance_tokens)
        self.device.synchronize()
        return self._produced.copy()


def draws_of(rows: int, position: int = 0, **options) -> list[Draw]:
    """Make draws of equal options and position, seeded by their rows."""
    sampling = Sampling(**options)
    return [Draw(sampling=sampling, seed=row, position=position) for row in range(rows)]


def later(draws: list[Draw], steps: int) -> list[Draw]:
    return [dataclasses.replace(draw, position=draw.position + steps) for draw in draws]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_greedy_takes_the_first_of_the_largest(vocabulary):
    logits = np.round(draw_logits(3, vocabulary))  # many are equal
    chooser = Chooser(logits)
    chooser.start([None, *draws_of(2)])
    np.testing.assert_array_equal(chooser.choose(), logits.argmax(axis=1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_choice_moves_the_state_on(temperature):
    chooser = Chooser(draw_logits(3, 100))
    chooser.start(draws_of(3, temperature=temperature))
    chooser.choose(advance_tokens=0)
    chosen = [chooser.choose() for _ in range(2)][-1]
    state = {
        field.name: chooser.device.download(getattr(chooser.state, field.name)) for field in dataclasses.fields(State)
    }
    np.testing.assert_array_equal(state["token_ids"], chosen)
    np.testing.assert_array_equal(state["positions"], [2] * 3)
    np.testing.assert_array_equal(state["past_len"], [9] * 3)
    np.testing.assert_array_equal(state["kv_len"], np.arange(9) + 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_with_nan_or_infinity_are_told_and_forgotten(bad, temperature):
    good = draw_logits(2, 5000)
    broken = good.copy()
    broken[1, 4321] = bad
    chooser = Chooser(broken)
    chooser.start(draws_of(2, temperature=temperature))
    first = chooser.choose()
    assert (first[0] >= 0, first[1]) == (True, BAD)
    chooser.device.write(chooser.logits, good)
    assert (chooser.choose() >= 0).all()


def test_the_penalty_counts_tokens_as_they_are_chosen():
    logits, sampling = draw_logits(2, 300), Sampling(repetition_penalty=3.0)
    chooser = Chooser(logits)
    histories = [[5, 9], [int(logits[1].argmax())]]
    chooser.start([Draw(sampling=sampling, seed=0, position=len(seen), seen=seen) for seen in histories])
    for _ in range(12):
        expected = [int(penalize(row, seen, 3.0).argmax()) for row, seen in zip(logits, histories, strict=True)]
        assert chooser.choose().tolist() == expected
        for seen, token in zip(histories, expected, strict=True):
            seen.append(token)


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_extreme_penalty_leaves_a_choice(penalty, temperature):
    logits = np.array([[3e38, -3e38, 1, 0]], np.float32)
    sampling = Sampling(temperature=temperature, repetition_penalty=penalty)
    draw = Draw(sampling=sampling, seed=0, position=2, seen=[0, 1])
    chooser = Chooser(logits)
    chooser.start([draw])
    assert chooser.choose().tolist() == choose(logits, [draw]) == [0]


@pytest.mark.parametrize("vocabulary", [50, 5003, 128_256])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_distribution_and_are_those_of_the_host(case, vocabulary):
    logits, draws = draw_logits(1, vocabulary), draws_of(ROWS, **case)
    chooser = Chooser(np.repeat(logits, ROWS, axis=0))
    chooser.start(draws)
    drawn = np.stack([chooser.choose() for _ in range(DRAWS)])
    assert_follows(drawn.reshape(-1), distribution(logits[0], Sampling(**case)))
    compared = slice(None, None, 1 if vocabulary < 10**5 else 10)  # the host takes its time
    rows = np.repeat(logits, len(draws[compared]), axis=0)
    host = np.stack([choose(rows, later(draws[compared], step)) for step in range(DRAWS)])
    assert (drawn[:, compared] != host).mean() <= UNDECIDED


@pytest.mark.parametrize("rounded", [False, True])
def test_penalized_draws_are_those_of_the_host(rounded):
    logits, seen = draw_logits(30, 3000), [list(range(row, 3000, 7)) for row in range(30)]
    if rounded:
        logits = np.round(logits)  # many are equal
    sampling = Sampling(temperature=0.8, top_k=300, top_p=0.95, repetition_penalty=1.4)
    draws = [Draw(sampling=sampling, seed=row, position=row, seen=seen[row]) for row in range(30)]
    chooser = Chooser(logits)
    chooser.start(draws)
    assert chooser.choose().tolist() == choose(logits, draws)


@pytest.mark.parametrize("case", [{"temperature": 1.0}, {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01}])
def test_draws_repeat_and_do_not_depend_on_the_batch(case):
    logits, draws = draw_logits(9, 32_000), draws_of(9, position=100, **case)
    together = Chooser(logits)
    together.start(draws)
    rows = [together.choose() for _ in range(20)]
    again = Chooser(logits, with_state=False)
    again.start(draws)
    np.testing.assert_array_equal([again.choose() for _ in range(20)], rows)
    alone = Chooser(logits[4:5])
    alone.start(draws[4:5])
    np.testing.assert_array_equal([alone.choose()[0] for _ in range(20)], [row[4] for row in rows])
    assert len({tuple(column) for column in np.transpose(rows)}) == 9


@pytest.mark.parametrize("case", [{"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}])
def test_a_chain_draws_what_its_positions_say(case):
    """Greedy choices in between count, too: the rows are started anew with later positions."""
    logits, draws = draw_logits(5, 4000), draws_of(5, position=2**32 - 3, **case)
    mixed = [*draws[:4], dataclasses.replace(draws[4], sampling=Sampling())]
    chooser = Chooser(logits)
    chooser.start(mixed)
    chain = [chooser.choose() for _ in range(8)]
    for step, tokens in enumerate(chain):
        chooser.start(later(mixed, step))
        np.testing.assert_array_equal(chooser.choose(), tokens)


@pytest.mark.parametrize("random", [False, True])
def test_greedy_choices_advance_the_draws(random):
    """Those of the kernel that takes the best, and of the one that draws for other rows."""
    logits, device, library = draw_logits(2, 4000), CudaBuffers(0), device_library.open_library()
    draws = [Draw(sampling=Sampling(temperature=t), seed=0, position=5) for t in (0.0, float(random))]
    rules, uploaded = device.upload(pack_rules(draws).view(np.uint8)), device.upload(logits)
    workspace = device.upload(np.zeros(library.ortolan_cuda_decode_workspace(2), np.uint8))
    produced = device.pinned((2,), np.int32)
    step = device_library.DecodeAdvance(
        logits=uploaded.data.ptr,
        rules=rules.data.ptr,
        num_sequences=2,
        vocab_size=4000,
        random=random,
        produced=produced.ctypes.data,
        workspace=workspace.data.ptr,
        stream=device.stream_pointer,
    )
    for _ in range(3):
        device_library.call(library, library.ortolan_cuda_decode_advance, step)
    assert device.download(rules).view(device_library.SAMPLING_RULE)["draw"].tolist() == [8, 8]
