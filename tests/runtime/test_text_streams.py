"""The text of a generation as its readers see it, with its spaces: from sessions, models and engines."""

import gc
import shutil
import weakref

import pytest
from byte_tokenizer import write_byte_tokenizer
from word_tokenizer import write_word_tokenizer

import ortolan
from ortolan import Engine, Sampling
from ortolan.errors import ConfigError, ContextLengthError, ContractMismatchError

VOCABULARY = 131
PROMPT = "w5 w7 w11"


def open_words(folder):
    """Open a copy of a model that has no tokenizer, with one of words and without end-of-sequence tokens."""
    write_word_tokenizer(folder, VOCABULARY)
    opened = ortolan.load(folder, device="cpu", num_threads=1)
    object.__setattr__(opened.manifest, "eos_token_ids", ())
    return opened


@pytest.fixture(scope="module")
def model(full_folder, tmp_path_factory):
    folder = shutil.copytree(full_folder, tmp_path_factory.mktemp("words") / "model")
    return open_words(folder)


@pytest.fixture(scope="module")
def paged_words(paged_model, tmp_path_factory):
    folder = shutil.copytree(paged_model.folder, tmp_path_factory.mktemp("paged words") / "model")
    return open_words(folder)


def continuation(model, prompt: list[int], tokens: list[int]) -> str:
    """Return what the tokenizer decodes for both, behind the prompt's part."""
    decode = model.tokenizer.decode
    return decode([*prompt, *tokens])[len(decode(prompt)) :]


def test_a_continuation_keeps_its_first_space(model):
    ids = model.tokenizer.encode(PROMPT)
    tokens = list(model.session().generate(ids, 12))
    pieces = list(model.session().stream_text(PROMPT, max_new_tokens=12))
    assert "".join(pieces) == continuation(model, ids, tokens)
    assert pieces == [f" w{token}" for token in tokens]
    assert list(model.session().stream_text(ids, max_new_tokens=12)) == pieces
    assert list(model.stream(PROMPT, max_new_tokens=12)) == pieces


@pytest.mark.parametrize("seed", range(4))
def test_any_text_is_what_is_decoded_for_all(model, seed):
    """Special tokens among them, and behind some of them."""
    sampling, ids = Sampling(temperature=8.0, seed=seed), [129, 130, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    tokens = list(model.session().generate(ids, 200, sampling))
    pieces = list(model.session().stream_text(ids, max_new_tokens=200, sampling=sampling))
    assert all(pieces)
    assert "".join(pieces) == continuation(model, ids, tokens)


def test_behind_special_tokens_alone_the_text_begins_anew(model):
    sampling = Sampling(temperature=8.0, seed=1)
    tokens = list(model.session().generate([0] * 20, 4, sampling))
    text = "".join(model.session().stream_text([0] * 20, max_new_tokens=4, sampling=sampling))
    assert text == continuation(model, [0] * 20, tokens) == " ".join(f"w{token}" for token in tokens)


def test_a_stop_cuts_a_text_that_keeps_its_space(model):
    tokens = list(model.session().generate(model.tokenizer.encode(PROMPT), 12))
    stop = f"w{tokens[6]}"
    cut = tokens.index(tokens[6])
    stream = model.session().stream_text(PROMPT, max_new_tokens=12, stop=stop, logprobs=2)
    assert "".join(stream) == "".join(f" w{token}" for token in tokens[:cut]) + " "
    assert stream.generation.finish_reason == "stop"
    assert [len(entry.top) for entry in stream.generation.logprobs] == [2] * cut


def test_later_turns_have_no_beginning(model):
    session = model.session()
    assert list(session.stream_text("w5", max_new_tokens=2))
    read = session.logical_length
    assert len(list(session.stream_text("w7 w9", max_new_tokens=1))) == 1
    assert session.logical_length == read + 3  # the token that waited, and two words


def test_text_is_known_while_tokens_come(model):
    answer = model.session().generate(model.tokenizer.encode(PROMPT), 4)
    assert answer.text == ""
    texts = [(token, answer.text) for token in answer]
    assert [text for _, text in texts] == ["".join(f" w{token}" for token, _ in texts[: n + 1]) for n in range(4)]


def test_text_goes_on_behind_a_file(model, tmp_path):
    whole = "".join(model.stream(PROMPT, max_new_tokens=9))
    session = model.session()
    session.stream_text(PROMPT, max_new_tokens=9)
    first = [next(session.generation) for _ in range(4)]
    session.save(tmp_path / "session")
    answer = model.restore(tmp_path / "session").resume()
    assert answer.text == "".join(f" w{token}" for token in first)
    assert len(list(answer)) == 5
    assert answer.text == whole


@pytest.mark.parametrize("stop", [[], ["never"]])
def test_a_request_always_has_its_text(paged_words, tmp_path, stop):
    whole = "".join(paged_words.stream(PROMPT, max_new_tokens=9))
    ids = paged_words.tokenizer.encode(PROMPT)
    with Engine(paged_words, 2) as engine:
        request = engine.submit(ids, 9, stop=stop)
        assert (len(request.result()), request.text) == (9, whole)
        session = paged_words.session()
        answer = session.generate(ids, 9, stop=stop)
        first = [next(answer) for _ in range(3)]
        session.save(tmp_path / "session")
        restored = engine.restore(tmp_path / "session")
        assert first + restored.result() == list(request.tokens)
        assert restored.text == whole


def test_without_a_tokenizer_there_is_no_text(full_model, paged_model):
    answer = full_model.session().generate([5, 6], 2)
    assert len(list(answer)) <= 2
    assert answer.text is None
    with Engine(paged_model, 2) as engine:
        request = engine.submit([5, 6], 2, ignore_eos=True)
        assert (len(request.result()), request.text) == (2, None)
    for make in (full_model.session().stream_text, full_model.stream):
        with pytest.raises(ContractMismatchError, match=r"has no tokenizer\.json"):
            make("w5", max_new_tokens=2)


def test_a_models_stream_takes_what_it_needs_and_gives_it_back(model, monkeypatch):
    sessions = []
    make = model.session

    def noted(*arguments, **options):
        session = make(*arguments, **options)
        sessions.append((weakref.ref(session.feeder.caches), session.plan.max_context))
        return session

    monkeypatch.setattr(model, "session", noted)
    stream = model.stream([5, 6, 7], max_new_tokens=6)
    assert len(list(stream)) == 6
    longest = "".join(model.stream([5] * 510, max_new_tokens=100))
    assert longest
    gc.collect()
    assert [(caches(), context) for caches, context in sessions] == [(None, 8), (None, 512)]
    assert list(stream) == []


def test_prompts_that_are_none_are_refused(model, paged_words):
    session = model.session()
    for call in (session.stream_text, model.stream):
        with pytest.raises(ConfigError, match="text without tokens"):
            call("", max_new_tokens=2)
        with pytest.raises(ConfigError, match="token_ids"):
            call([1.5], max_new_tokens=2)
        with pytest.raises(ConfigError, match="max_new_tokens is 0"):
            call([5], max_new_tokens=0)
        with pytest.raises(ContextLengthError):
            call([5] * 600, max_new_tokens=2)
    for call in (session.prefill, session.generate, session.score):
        with pytest.raises(ConfigError, match=r"encode it first: model\.tokenizer\.encode"):
            call("w5 w7")
    with Engine(paged_words, 2) as engine, pytest.raises(ConfigError, match="encode it first"):
        engine.submit("w5")


def test_a_text_of_bytes_comes_in_whole_characters(full_folder, tmp_path):
    folder = shutil.copytree(full_folder, tmp_path / "model")
    write_byte_tokenizer(folder)
    model = ortolan.load(folder, device="cpu", num_threads=1)
    sampling = Sampling(temperature=5.0, seed=3)
    tokens = list(model.session().generate([40, 41], 60, sampling))
    pieces = list(model.session().stream_text([40, 41], max_new_tokens=60, sampling=sampling))
    assert "".join(pieces) == model.tokenizer.decode(tokens)
