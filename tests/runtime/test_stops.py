"""Stop tokens and stop strings of an engine's requests; tokens are parts of words and of characters."""

import numpy as np
import pytest
from byte_tokenizer import write_byte_tokenizer
from fake_batch import FakeStepper, expected_tokens, make_manifest, make_plan
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers

from ortolan import Engine, Model, load
from ortolan.errors import ConfigError
from ortolan.runtime.stops import StopFilter
from ortolan.runtime.tokenizer import Tokenizer

PIECES = ("a", "b", "c", "ab", "bca", "cc", "abcabc")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Bytes, some longer pieces behind them, and one special token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for piece in PIECES:
        vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = HfTokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def ids(tokenizer):
    """Ids by text; those of the three bytes of the euro sign by "€0" to "€2", the special one's by "<s>"."""
    known = {tokenizer.decode([i], skip_special_tokens=False): i for i in range(256 + len(PIECES) - 3 + 1)}
    euro = tokenizer.encode("€", add_special_tokens=False)
    return {**{piece: known[piece] for piece in (*PIECES, "<s>")}, **{f"€{n}": token for n, token in enumerate(euro)}}


def run_filter(stop_filter, tokens):
    """Push tokens until one stops; returns those handed on, whether they were stopped, and how many were pushed."""
    out = []
    for count, token in enumerate(tokens, 1):
        seen, stopped = stop_filter.push(token)
        out += seen
        if stopped:
            return out, True, count
    seen, stopped = stop_filter.flush()
    return out + seen, stopped, len(tokens)


def expected_stop(tokenizer, tokens, strings, sequences):
    """Find the first number of tokens at which something stops, by decoding all beginnings; then where it is cut."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count])
        begins = [text.find(s) for s in strings if s in text]
        cuts = [count - len(s) for s in sequences if tokens[:count][-len(s) :] == s]
        if begins:
            inside = max(n for n in range(count) if ends_before(tokenizer, tokens[:n], min(begins)))
            if inside <= min(cuts, default=count):
                return tokens[:inside], text[: min(begins)], count
        if cuts:
            return tokens[: min(cuts)], tokenizer.decode(tokens[: min(cuts)]), count
    return tokens, tokenizer.decode(tokens), None


def ends_before(tokenizer, tokens, offset):
    """Say whether tokens are whole characters, none of them past an offset."""
    text = tokenizer.decode(tokens)
    return len(text) <= offset and not text.endswith("\ufffd")


WORDS = st.sampled_from(["a", "b", "c", "ab", "bca", "cc", "abcabc", "€", "<s>"])


@given(
    words=st.lists(WORDS, max_size=14),
    strings=st.lists(st.text("abc€", min_size=1, max_size=4), max_size=3),
    sequences=st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3), max_size=2),
)
def test_all_ends_where_the_first_stop_is_whole(tokenizer, ids, words, strings, sequences):
    spelled = [part for word in words for part in (("€0", "€1", "€2") if word == "€" else (word,))]
    tokens, stops = [ids[word] for word in spelled], [[ids[piece] for piece in s] for s in sequences]
    expected, text, count = expected_stop(tokenizer, tokens, strings, stops)
    stop_filter = StopFilter([*strings, *stops], 10**6, tokenizer.stream)
    out, stopped, pushed = run_filter(stop_filter, tokens)
    assert (out, stopped, pushed) == (expected, count is not None, count or len(tokens))
    assert stop_filter.text == (text if strings else None)


def test_what_comes_before_a_stop_string_in_its_token_is_text_but_no_token(tokenizer, ids):
    stop_filter = StopFilter(["ca"], 10**6, tokenizer.stream)
    assert run_filter(stop_filter, [ids["a"], ids["ab"], ids["bca"]]) == ([ids["a"], ids["ab"]], True, 3)
    assert stop_filter.text == "aabb"


def test_a_token_is_held_back_until_no_stop_string_reaches_into_it(tokenizer, ids):
    stop_filter = StopFilter(["abb", "b€"], 10**6, tokenizer.stream)
    steps = [("c", ["c"]), ("ab", []), ("a", ["ab"]), ("b", []), ("€0", []), ("€1", [])]
    for word, seen in steps:
        assert stop_filter.push(ids[word]) == ([ids[w] for w in seen], False)
    assert stop_filter.text == "cab"
    assert stop_filter.push(ids["€2"]) == ([ids["a"]], True)
    assert stop_filter.text == "caba"


def test_bytes_that_never_become_a_character_are_handed_on_at_the_end(tokenizer, ids):
    stop_filter = StopFilter(["zz"], 10**6, tokenizer.stream)
    assert stop_filter.push(ids["€0"]) == ([], False)
    assert stop_filter.flush() == ([ids["€0"]], False)
    assert stop_filter.text == "\ufffd"


@pytest.mark.parametrize(
    ("stops", "pushed", "seen", "stopped"),
    [
        ([5], [1, 2, 5], [1, 2], True),
        ([[1, 1, 2]], [1, 1, 1, 2], [1], True),
        ([[1, 2, 3], [2, 4]], [1, 2, 4], [1], True),
        ([[1, 2, 3]], [1, 2, 1, 2], [1, 2], False),
        ([], [1, 2], [1, 2], False),
    ],
)
def test_stop_sequences_are_found_where_they_overlap(stops, pushed, seen, stopped):
    assert run_filter(StopFilter(stops, 10), pushed) == (seen if stopped else pushed, stopped, len(pushed))


@pytest.mark.parametrize(
    "stop", [[[]], [10], [[3, -1]], [True], ["a"], [""], [[1.5]], [["a"]], [None], 10, True, None, "", b"a", [b"\x01"]]
)
def test_stops_that_are_no_tokens_are_refused(stop):
    with pytest.raises(ConfigError, match="stop"):
        StopFilter(stop, 10)


def test_one_stop_needs_no_list(tokenizer):
    assert run_filter(StopFilter(5, 10), [1, 5, 2])[:2] == ([1], True)
    assert run_filter(StopFilter("bc", 300, tokenizer.stream), tokenizer.encode("abca"))[1]


def test_an_empty_stop_string_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="empty"):
        StopFilter(["a", ""], 10, tokenizer.stream)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_engine_ends_requests_at_stop_strings(tokenizer, runs_ahead):
    manifest = make_manifest(rings=False)
    plan = make_plan(manifest, 64)
    stepper = FakeStepper(manifest, plan)
    stepper.runs_ahead = runs_ahead
    prompts = [np.random.default_rng(i).integers(0, 50, 20 + i).tolist() for i in range(3)]
    wanted = [expected_tokens(manifest, prompt, 40) for prompt in prompts]
    text = tokenizer.decode(wanted[0])
    stop = text[12:15]
    with Engine._of(manifest, plan, stepper, tokenizer=tokenizer) as engine:
        streams = [engine.submit(prompt, 40, stop=[stop]) for prompt in prompts]
        other = engine.submit(prompts[0], 40)
        for stream, tokens in zip(streams, wanted, strict=True):
            expected, cut, count = expected_stop(tokenizer, tokens, [stop], [])
            assert (stream.result(), stream.text) == (expected, cut)
            assert stream.finish_reason == ("length" if count is None else "stop")
        assert (other.result(), other.text, other.finish_reason) == (wanted[0], None, "length")
        memory = engine.memory()
    assert streams[0].finish_reason == "stop"
    assert memory.held_bytes == 0


def test_bad_stop_strings_are_refused_by_submit(paged_model):
    with Engine(load(paged_model.folder, device="cpu", num_threads=1), 2) as engine:
        good = engine.submit([5, 6, 7], 8, ignore_eos=True)
        with pytest.raises(ConfigError, match=r"stop holds a text, but .* has no tokenizer\.json"):
            engine.submit([5, 6, 7], stop=["a"])
        with pytest.raises(ConfigError, match="empty"):
            engine.submit([5, 6, 7], stop=[""])
        assert len(good.result()) == 8


def test_stop_strings_reach_a_models_own_tokenizer(paged_model, tmp_path):
    model: Model = load(paged_model.folder, device="cpu", num_threads=1)
    write_byte_tokenizer(tmp_path)
    model._tokenizer = Tokenizer(tmp_path)
    with Engine(model, 2) as engine:
        tokens = engine.submit([5, 6, 7], 30, ignore_eos=True).result()
        stop = model.tokenizer.decode(tokens)[8:10]
        stream = engine.submit([5, 6, 7], 30, ignore_eos=True, stop=[stop])
        assert stream.result() == expected_stop(model.tokenizer, tokens, [stop], [])[0]
        assert stream.finish_reason == "stop"
        assert stop not in stream.text
