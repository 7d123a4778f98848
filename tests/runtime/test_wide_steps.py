"""Steps of a few tokens whose logits are all wanted: captured by width, equal to feeding the tokens one by one."""

import dataclasses

import numpy as np
import pytest
from fake_cuda import on_fake_cuda
from parity import relative_difference
from tolerances import LOGPROBS, SAME_LOGITS

from ortolan import contract
from ortolan.runtime.generate.draw import Draw
from ortolan.runtime.options import Sampling
from ortolan.runtime.steps.cuda import MOST_STEP_TOKENS
from ortolan.runtime.steps.feeder import Wanted
from ortolan.runtime.steps.row import Row

NO_GRAPH = "-1"


class Recording:
    """A session of ONNX Runtime that notes the graph id of each run."""

    def __init__(self, ort_session) -> None:
        self.graph_ids: list[str] = []
        self._ort_session = ort_session

    def __getattr__(self, name):
        return getattr(self._ort_session, name)

    def run_with_iobinding(self, binding, options=None) -> None:
        self.graph_ids.append(options.get_run_config_entry("gpu_graph_id"))
        self._ort_session.run_with_iobinding(binding, options)


@pytest.fixture(params=["full_model", "mixed_model", "paged_mixed_model"])
def model(request, monkeypatch):
    """A model on a device of NumPy arrays, whose graph runs are recorded."""
    placed = on_fake_cuda(request.getfixturevalue(request.param), monkeypatch)
    placed.decoder = dataclasses.replace(placed.decoder, session=Recording(placed.decoder.session))
    return placed


def read_to(session, tokens):
    """Read tokens; returns what runs single steps after them, with room for a wide one."""
    session.prefill(tokens)
    session.feeder.make_room(MOST_STEP_TOKENS)
    return session.feeder


def all_wanted(count: int) -> Wanted:
    return Wanted(draws=(None,) * count)


@pytest.mark.parametrize("before", [5, 140])
@pytest.mark.parametrize("width", [2, 3, 8, MOST_STEP_TOKENS])
def test_logits_of_all_tokens_equal_those_of_single_steps(model, draw_tokens, width, before):
    single, wide = model.session(), model.session()
    tokens = draw_tokens(width, seed=1)
    feeder = read_to(wide, draw_tokens(before))
    single.prefill(draw_tokens(before))
    expected = np.array([single.step(token) for token in tokens])
    row = feeder.row(tokens, 0, all_wanted(width))
    assert not feeder.stepper.is_ready(row)
    assert feeder.stepper.capture(row) > 0
    assert feeder.stepper.is_ready(row)
    logits = feeder.stepper.run([row]).logits()
    assert logits.shape == expected.shape
    assert relative_difference(logits, expected) <= SAME_LOGITS
    np.testing.assert_array_equal(logits.argmax(axis=1), expected.argmax(axis=1))
    feeder.count(tokens)
    assert relative_difference(wide.step(9), single.step(9)) <= SAME_LOGITS


def test_each_width_is_captured_once(model, draw_tokens):
    session = model.session()
    feeder, recorded = read_to(session, draw_tokens(30)), model.decoder.session.graph_ids
    recorded.clear()
    sizes = [feeder.stepper.bytes]
    for width in (1, 3, 5, 3, 1, 5):
        feeder.stepper.run([feeder.row(draw_tokens(width), 0, all_wanted(width))]).tokens()
        sizes.append(feeder.stepper.bytes)
    one, three, five, *again = recorded
    assert len({one, three, five, NO_GRAPH}) == 4
    assert again == [three, one, five]
    assert sizes[2] > sizes[1]
    assert sizes[3] > sizes[2]
    assert sizes[3:] == [sizes[3]] * 4


@pytest.mark.parametrize(("count", "wanted"), [(5, 1), (5, 4), (MOST_STEP_TOKENS + 1, MOST_STEP_TOKENS + 1)])
def test_other_steps_run_kernel_by_kernel(model, draw_tokens, count, wanted):
    single, wide = model.session(), model.session(chunk_size=64)
    tokens = draw_tokens(count, seed=1)
    feeder = read_to(wide, draw_tokens(30))
    single.prefill(draw_tokens(30))
    expected = np.array([single.step(token) for token in tokens])[-wanted:]
    row = feeder.row(tokens, 0, all_wanted(wanted))
    model.decoder.session.graph_ids.clear()
    assert feeder.stepper.is_ready(row)
    assert feeder.stepper.capture(row) is None
    logits = feeder.stepper.run([row]).logits()
    assert model.decoder.session.graph_ids == [NO_GRAPH]
    assert logits.shape == expected.shape
    assert relative_difference(logits, expected) <= SAME_LOGITS


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5, top_k=40, repetition_penalty=1.2)])
def test_each_row_of_logits_chooses_as_a_single_step_would(model, draw_tokens, sampling):
    prompt, tokens = draw_tokens(40), draw_tokens(6, seed=1)
    everything = [*prompt, *tokens]
    draws = [Draw(sampling=sampling, seed=7, position=end, seen=everything[:end]) for end in range(41, 47)]
    single, wide = model.session(), model.session()
    chosen, scored = [], []
    for feeder in (read_to(single, prompt), read_to(wide, prompt)):
        pieces = [tokens] if feeder is wide.feeder else [[token] for token in tokens]
        begin = 0
        for piece in pieces:
            wanted = Wanted(draws=draws[begin : begin + len(piece)], logprobs=3)
            result = feeder.stepper.run([feeder.row(piece, 0, wanted)])
            chosen += result.tokens()
            scored += result.logprobs()
            feeder.count(piece)
            begin += len(piece)
    assert chosen[:6] == chosen[6:]
    for one, other in zip(scored[:6], scored[6:], strict=True):
        assert (one.token, [token for token, _ in one.top]) == (other.token, [token for token, _ in other.top])
        assert one.logprob == pytest.approx(other.logprob, abs=LOGPROBS)


def test_only_as_many_tokens_as_are_counted_were_read(model, draw_tokens):
    """The rest is written, and is overwritten: as a draft that was not accepted."""
    session = model.session()
    feeder = read_to(session, draw_tokens(130))
    for accepted in (0, 2, 5):
        tokens = draw_tokens(5, seed=accepted)
        feeder.stepper.run([feeder.row(tokens, 0, all_wanted(5))]).tokens()
        feeder.count(tokens[:accepted])
        feeder.discard(5 - accepted)
    everything = [*draw_tokens(130), *draw_tokens(5, seed=2)[:2], *draw_tokens(5, seed=5)]
    assert session.state.history == everything
    expected = model.session().prefill([*everything, 9])
    assert relative_difference(session.step(9), expected) <= SAME_LOGITS


@pytest.mark.parametrize("width", [1, 4])
def test_rows_of_several_sequences_share_a_captured_step(request, monkeypatch, draw_tokens, width):
    host = request.getfixturevalue("paged_model")
    model = on_fake_cuda(host, monkeypatch)
    model.decoder = dataclasses.replace(model.decoder, session=Recording(model.decoder.session))
    _, stepper = model.pool_stepper(model.plan_engine(3, chunk_tokens=64))
    prompts = [draw_tokens(20, seed=1), draw_tokens(33, seed=2), draw_tokens(7, seed=3)]
    pages = [{"full": [4, 1, 6]}, {"full": [0, 7, 3]}, {"full": [5, 2]}]
    for prompt, held in zip(prompts, pages, strict=True):
        stepper.run([Row(tokens=prompt, logical=0, pages=held)]).tokens()
    model.decoder.session.graph_ids.clear()
    for count in (3, 2, 3, 2):
        rows = [
            Row(tokens=draw_tokens(width, seed=9 + b), logical=len(prompts[b]), pages=pages[b], draws=(None,) * width)
            for b in range(count)
        ]
        logits = stepper.run(rows).logits()
        assert len(logits) == count * width
        for b, row in enumerate(rows):
            session = host.session()
            session.prefill(prompts[b])
            expected = np.array([session.step(token) for token in row.tokens])
            assert relative_difference(logits[b * width : (b + 1) * width], expected) <= SAME_LOGITS
    three, two, *again = model.decoder.session.graph_ids
    assert again == [three, two]
    assert len({three, two, NO_GRAPH}) == 3


def test_steps_are_told_the_most_tokens_of_a_sequence(request, monkeypatch, draw_tokens):
    """A captured step is told the most that it may have; the CPU's operators refuse less than a sequence has."""
    model = on_fake_cuda(request.getfixturevalue("paged_mixed_model"), monkeypatch)
    told, bind = [], model.device.cuda.bind_host_input

    def note(binding, name, array):
        if name == contract.MAX_QUERY_LEN:
            told.append(int(array[0]))
        bind(binding, name, array)

    monkeypatch.setattr(model.device.cuda, "bind_host_input", note)
    plan = model.plan_engine(2, chunk_tokens=64)
    _, stepper = model.pool_stepper(plan)
    pages = [{kind.name: list(range(b, 6, 2)) for kind in plan.kinds} for b in range(2)]
    lengths = [0, 0]
    for counts in ((20, 5), (3, 9), (4, 4), (4, 4), (1, 1)):
        drawn = counts[0] == counts[1]
        rows = [
            Row(tokens=draw_tokens(count), logical=length, pages=held, draws=(None,) * (count if drawn else 1))
            for count, length, held in zip(counts, lengths, pages, strict=True)
        ]
        stepper.run(rows).tokens()
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
    assert told == [20, 9, 4, 1]
