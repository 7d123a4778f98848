"""Stops and log-probabilities of generations in sessions: host and device, contiguous and paged."""

import gc
import random
import weakref

import numpy as np
import pytest
from byte_tokenizer import write_byte_tokenizer
from fake_cuda import on_fake_cuda
from families import tiny_checkpoint
from parity import relative_difference
from sessions import DEVICES
from tolerances import FLOAT32_SUMS, LOGPROBS, SAME_LOGITS

import ortolan
from ortolan import Sampling, SnapKv
from ortolan.errors import ConfigError

VOCABULARY = 64  # as many as log-probabilities come with each token at most
FIRST = 33  # the character of token 0; token i is character FIRST + i
SAMPLING = Sampling(temperature=1.3, repetition_penalty=1.1, seed=8)
COUNT = 30


@pytest.fixture(scope="module", params=[0, 16], ids=["contiguous", "paged"])
def host_model(request, tmp_path_factory):
    """A model with rings and full attention whose tokens are single characters, none of which ends a sequence."""
    root = tmp_path_factory.mktemp("generation")
    checkpoint = tiny_checkpoint("gemma3", root / "hf", seed=5, num_key_value_heads=2, vocab_size=VOCABULARY)
    pages = {"paged": True, "page_size": request.param} if request.param else {}
    folder = ortolan.export(checkpoint, root / "model", max_context=512, chunk_size=16, sink=2, **pages)
    write_byte_tokenizer(folder)
    model = ortolan.load(folder, device="cpu", num_threads=1)
    object.__setattr__(model.manifest, "eos_token_ids", ())
    return model


@pytest.fixture(params=DEVICES)
def model(request, host_model, monkeypatch):
    return on_fake_cuda(host_model, monkeypatch) if request.param == "device" else host_model


def draw(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()


def text_of(tokens: list[int]) -> str:
    return "".join(chr(FIRST + token) for token in tokens)


def find_stop(tokens: list[int], stops: list[list[int]]) -> tuple[int, int]:
    """Return how many tokens come before the first stop to be whole, and with it; both past the end without one."""
    for end in range(1, len(tokens) + 1):
        begins = [end - len(stop) for stop in stops if tokens[max(0, end - len(stop)) : end] == stop]
        if begins:
            return min(begins), end
    return len(tokens) + 1, len(tokens) + 1


def draw_stops(rng: random.Random, tokens: list[int]) -> list[list[int]]:
    """Draw pieces of what is generated, some of which end otherwise."""
    stops = []
    for _ in range(rng.randint(1, 4)):
        begin, length = rng.randrange(4, len(tokens)), rng.randint(1, 4)
        stop = tokens[begin : begin + length]
        stops.append(stop if rng.random() < 0.6 else [*stop, rng.randrange(VOCABULARY)])
    return stops


def spelled(rng: random.Random, stop: list[int]) -> object:
    """Spell a stop as a text, as ids, or as one id."""
    return rng.choice([text_of(stop), stop, *([stop[0]] if len(stop) == 1 else [])])


@pytest.mark.parametrize("sampling", [None, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(6))
def test_stops_end_a_generation_and_are_not_yielded(host_model, model, sampling, seed):
    rng, prompt = random.Random(seed), draw(40)
    tokens = list(host_model.session().generate(prompt, COUNT, sampling))
    stops = draw_stops(rng, tokens)
    shown, end = find_stop(tokens, stops)
    session = model.session()
    stream = session.generate(prompt, COUNT, sampling, stop=[text_of(stops[0]), *(spelled(rng, s) for s in stops[1:])])
    assert list(stream) == stream.tokens == tokens[:shown]
    assert stream.finish_reason == session.finish_reason == ("stop" if end <= COUNT else "length")
    assert stream.text == text_of(tokens[:shown])
    assert session.state.history == [*prompt, *tokens[: min(end, COUNT) - 1]]
    assert session.logical_length == 40 + min(end, COUNT) - 1
    question = draw(9, seed=1)
    before = session.state.history if end <= COUNT else [*prompt, *tokens]
    expected = host_model.session().prefill([*before, *question])
    assert relative_difference(session.prefill(question), expected) <= SAME_LOGITS


def test_one_stop_needs_no_list(host_model, model):
    tokens = list(host_model.session().generate(draw(40), COUNT))
    shown, _ = find_stop(tokens, [tokens[5:6]])
    for stop in (tokens[5], text_of(tokens[5:6])):
        assert list(model.session().generate(draw(40), COUNT, stop=stop)) == tokens[:shown]


def test_without_stop_texts_there_is_a_text_too(model):
    stream = model.session().generate(draw(5), 4, stop=[[6, 3, 9]])
    assert stream.text == ""
    tokens = list(stream)
    assert (len(tokens), stream.text) == (4, text_of(tokens))


@pytest.mark.parametrize("stop", ["", [[]], [VOCABULARY], -1, 1.5, [None], b"a"], ids=repr)
def test_stops_that_are_none_are_refused_before_anything_is_read(model, stop):
    session = model.session()
    with pytest.raises(ConfigError, match="stop contains"):
        session.generate(draw(5), stop=stop)
    assert session.logical_length == 0


@pytest.mark.parametrize("first", [1, 5, 11])
@pytest.mark.parametrize("seed", range(4))
def test_a_stop_may_end_behind_the_limit_that_a_generation_had_first(host_model, model, first, seed):
    """What the limit showed cannot be taken back, but still counts for a stop that ends later."""
    tokens, rng = list(host_model.session().generate(draw(40), COUNT)), random.Random(seed)
    begin = rng.randrange(first)
    stop = tokens[begin : first + rng.randint(1, 3)]
    shown, end = find_stop(tokens, [stop])
    session = model.session()
    stream = session.generate(draw(40), first, stop=[rng.choice([stop, text_of(stop)])])
    taken = list(stream)
    if end <= first:
        assert taken == tokens[:shown]
        with pytest.raises(ConfigError, match="no generation can be resumed"):
            session.resume(5)
        return
    assert (taken, session.finish_reason) == (tokens[:first], "length")
    assert list(session.resume(COUNT)) == tokens[first : max(first, shown)]
    assert session.finish_reason == "stop"
    assert session.state.history == [*draw(40), *tokens[: end - 1]]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.mark.parametrize("k", [0, 5, VOCABULARY])
@pytest.mark.parametrize("sampling", [None, SAMPLING], ids=["greedy", "sampled"])
def test_log_probabilities_are_those_of_the_logits(host_model, model, sampling, k):
    """However tokens are chosen: neither temperature nor penalty counts."""
    session, plain = model.session(), host_model.session()
    stream = session.generate(draw(40), COUNT, sampling, logprobs=k)
    tokens = list(stream)
    rows = [plain.prefill(draw(40)), *(plain.step(token) for token in tokens[:-1])]
    assert [each.token for each in stream.logprobs] == tokens
    for row, each in zip(rows, stream.logprobs, strict=True):
        expected = log_softmax(row)
        assert each.logprob == pytest.approx(expected[each.token], abs=LOGPROBS)
        values = [value for _, value in each.top]
        assert len(each.top) == k
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx([expected[token] for token, _ in each.top], abs=LOGPROBS)
        assert values == pytest.approx(np.sort(expected)[::-1][:k], abs=LOGPROBS)
        if k == VOCABULARY:
            assert sorted(token for token, _ in each.top) == list(range(VOCABULARY))
            assert np.exp(values).sum() == pytest.approx(1, abs=FLOAT32_SUMS)


def test_tokens_that_a_stop_holds_back_keep_their_log_probabilities(host_model, model):
    whole = host_model.session().generate(draw(40), COUNT, logprobs=2)
    tokens = list(whole)
    stop = tokens[6:9]
    shown, _ = find_stop(tokens, [stop])
    stream = model.session().generate(draw(40), COUNT, stop=[[*tokens[2:5], VOCABULARY - 1], stop], logprobs=2)
    assert list(stream) == tokens[:shown]
    assert [each.token for each in stream.logprobs] == tokens[:shown]
    for each, expected in zip(stream.logprobs, whole.logprobs, strict=False):
        assert each.logprob == pytest.approx(expected.logprob, abs=LOGPROBS)
        assert [token for token, _ in each.top] == [token for token, _ in expected.top]


@pytest.mark.parametrize("logprobs", [-1, VOCABULARY + 1, 1.5, "all", True])
def test_numbers_of_log_probabilities_are_checked_before_anything_is_read(model, logprobs):
    session = model.session()
    with pytest.raises(ConfigError, match="logprobs"):
        session.generate(draw(5), logprobs=logprobs)
    assert session.logical_length == 0


def test_a_generation_that_is_closed_yields_no_more_and_is_resumed(host_model, model):
    tokens = list(host_model.session().generate(draw(40), COUNT))
    session = model.session()
    stream = session.generate(draw(40), COUNT)
    taken = [next(stream) for _ in range(5)]
    stream.close()
    assert list(stream) == []
    assert session.finish_reason is None
    assert taken + list(session.resume()) == tokens


def test_a_generation_outlives_who_holds_its_session(host_model, model):
    tokens = list(host_model.session().generate(draw(40), COUNT))
    assert list(model.session().generate(draw(40), COUNT)) == tokens


def test_caches_go_with_the_session_and_its_generation(model):
    """At once: on a device another session may need the memory."""
    gc.collect()
    gc.disable()
    try:
        session = model.session(snapkv=SnapKv(budget=40, window=8, sink=2))
        stream = session.generate(draw(60), COUNT)
        next(stream)
        store = weakref.ref(session.feeder.caches.store)
        del session
        assert store() is not None
        next(stream)
        del stream
        assert store() is None
    finally:
        gc.enable()
