"""Stop tokens and stop texts; tokens are parts of words and of characters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stop_reference import PIECES, expected_stop, make_tokenizer

from ortolan.errors import ConfigError
from ortolan.runtime.generate.stops import StopFilter


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


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
    "stop",
    [
        *([[]], [10], [[3, -1]], [True], ["a"], [""], [[1.5]], [["a"]], [None], [b"\x01"], [np.array(3)]),
        *(10, True, None, "", b"a", np.array(3)),
    ],
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
