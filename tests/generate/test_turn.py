"""One generation: what is shown and when, why it ends, and that it goes on after a description or another limit."""

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from stop_reference import PIECES, make_tokenizer

from ortolan import Sampling
from ortolan.errors import ConfigError, ContractMismatchError
from ortolan.runtime.generate.logprobs import TokenLogprobs
from ortolan.runtime.generate.turn import Turn, TurnOptions

VOCABULARY, EOS, MAX_CONTEXT = 300, 299, 10**6
PROMPT_TOKENS = 5


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def make_turn(tokenizer=None, **options) -> Turn:
    options = {"eos_token_ids": frozenset([EOS]), "max_new_tokens": 100} | options
    return Turn(TurnOptions(**options), VOCABULARY, tokenizer.stream if tokenizer else None)


def feed(turn: Turn, tokens: list[int], max_context: int = MAX_CONTEXT) -> list[int]:
    """Let a turn accept tokens until it ends; returns those shown. Each token has log-probabilities of its own."""
    shown = []
    for token in tokens:
        if turn.finish_reason is not None:
            break
        length = PROMPT_TOKENS + turn.count + 1
        shown += turn.accept(token, length, max_context, TokenLogprobs(token, -float(turn.count)))
    assert all(each.token == each.logprobs.token for each in shown)
    return [each.token for each in shown]


def revive(turn: Turn, tokenizer=None) -> Turn:
    described = json.loads(json.dumps(turn.describe()))
    return Turn.from_description(described, VOCABULARY, tokenizer.stream if tokenizer else None)


def test_the_end_of_sequence_is_neither_shown_nor_counted():
    turn = make_turn(stop=[[1, 2, 3]])
    assert feed(turn, [7, 1, 2, EOS, 9]) == [7, 1, 2]
    assert (turn.finish_reason, turn.count, turn.can_go_on) == ("eos", 3, False)


def test_without_end_of_sequence_ids_nothing_ends_it_but_limits():
    turn = make_turn(eos_token_ids=frozenset(), max_new_tokens=3)
    assert feed(turn, [EOS] * 5) == [EOS] * 3
    assert (turn.finish_reason, turn.can_go_on) == ("length", True)


@pytest.mark.parametrize(
    ("tokens", "max_context", "shown", "reason"),
    [
        ([4, 1, 1, 1, 5], MAX_CONTEXT, [4, 1, 1, 1], "length"),
        ([4, 1, 2, 1, 5], 7, [4, 1, 2], "context"),  # the third makes eight
        ([4, 1, 1, 2, 5], MAX_CONTEXT, [4, 1], "stop"),  # whole with the last that may come
        ([4, 1, EOS], 7, [4, 1], "eos"),
        ([1, 1, 1, 1], 8, [1, 1, 1, 1], "length"),  # both limits at once
    ],
)
def test_reasons_to_end_have_an_order(tokens, max_context, shown, reason):
    turn = make_turn(max_new_tokens=4, stop=[[1, 2]] if reason == "stop" else [[2, 9]])
    assert feed(turn, tokens, max_context) == shown
    assert turn.finish_reason == reason


def test_tokens_are_held_back_with_their_log_probabilities():
    turn = make_turn(stop=[[1, 2, 3]])
    shown = [turn.accept(token, 9, MAX_CONTEXT, TokenLogprobs(token, -n)) for n, token in enumerate([1, 2, 1, 5])]
    assert [[(each.token, each.logprobs.logprob) for each in step] for step in shown] == [
        [],
        [],
        [(1, 0), (2, -1)],
        [(1, -2), (5, -3)],
    ]


def test_a_fresh_seed_is_drawn_once():
    first, second = make_turn(sampling=Sampling(temperature=1.0)), make_turn()
    seeds = [turn.draws([], position)[0].seed for turn, position in ((first, 3), (first, 4), (revive(first), 3))]
    assert seeds == [first.sampling.seed] * 3
    assert second.draws([], 3)[0].seed != first.sampling.seed


def test_draws_have_the_seed_and_their_positions():
    turn = make_turn(sampling=Sampling(temperature=0.5, seed=11))
    draws = turn.draws([7] * 40, 40, [1, 2])
    assert [(draw.seed, draw.position, draw.sampling.temperature) for draw in draws] == [
        (11, position, 0.5) for position in (40, 41, 42)
    ]
    assert [len(draw.seen) for draw in draws] == [0, 0, 0]  # without a penalty, nothing is copied


@pytest.mark.parametrize(("position", "known"), [(2, [5, 6]), (3, [5, 6, 7]), (5, [5, 6, 7])])
def test_draws_with_a_penalty_have_seen_what_comes_before_each(position, known):
    turn = make_turn(sampling=Sampling(repetition_penalty=1.5))
    draws = turn.draws([5, 6, 7], position, [1, 2])
    assert [list(draw.seen) for draw in draws] == [known, [*known, 1], [*known, 1, 2]]


WORDS = st.lists(st.sampled_from([*PIECES, "€0", "€1", "€2", "<s>", "end"]), max_size=14)
STOPS = st.lists(
    st.one_of(st.text("abc€", min_size=1, max_size=4), st.lists(st.sampled_from(PIECES), min_size=1, max_size=3)),
    max_size=3,
)


def spell(tokenizer, words):
    """Turn names of tokens, and lists of them, into ids; texts as stops stay."""
    ids = {tokenizer.decode([i], skip_special_tokens=False): i for i in range(256 + len(PIECES) - 3 + 1)}
    euro = {f"€{n}": token for n, token in enumerate(tokenizer.encode("€", add_special_tokens=False))}
    known = {**ids, **euro, "end": EOS}
    return [[known[part] for part in word] if isinstance(word, list) else known.get(word, word) for word in words]


@given(words=WORDS, stops=STOPS, cut=st.integers(0, 14), limit=st.integers(1, 14))
def test_a_described_generation_goes_on_as_if_it_had_not_been_left(tokenizer, words, stops, cut, limit):
    tokens = spell(tokenizer, words)
    stop = [each if isinstance(each, str) else spell(tokenizer, each) for each in stops]
    whole = make_turn(tokenizer, stop=stop, max_new_tokens=limit)
    expected = feed(whole, tokens)
    first = make_turn(tokenizer, stop=stop, max_new_tokens=limit)
    shown = feed(first, tokens[:cut])
    second = revive(first, tokenizer)
    assert second.text == first.text
    assert second.describe() == first.describe()
    shown += feed(second, tokens[cut:])
    assert (shown, second.text, second.count, second.finish_reason) == (
        expected,
        whole.text,
        whole.count,
        whole.finish_reason,
    )
    assert second.describe() | {"sampling": 0} == whole.describe() | {"sampling": 0}


@given(words=WORDS, stops=STOPS, limit=st.integers(1, 14), revived=st.booleans())
@example(words=["a"], stops=[["a", "a"]], limit=1, revived=False)
@example(words=["a"], stops=["aa"], limit=1, revived=True)
def test_another_limit_goes_on_with_what_was_held_back(tokenizer, words, stops, limit, revived):
    tokens = spell(tokenizer, words)
    stop = [each if isinstance(each, str) else spell(tokenizer, each) for each in stops]
    whole, turn = make_turn(tokenizer, stop=stop), make_turn(tokenizer, stop=stop, max_new_tokens=limit)
    expected, shown = feed(whole, tokens), feed(turn, tokens)
    if revived:
        turn = revive(turn, tokenizer)
    assert turn.text is not None  # which reads it, so that the end's text is known to be there
    if turn.can_go_on:
        turn.reopen(100, PROMPT_TOKENS + turn.count, MAX_CONTEXT)
    before = len(shown)  # cannot be taken back
    shown += feed(turn, tokens[turn.count :])
    assert shown == tokens[: max(len(expected), before)]
    assert (turn.text, turn.finish_reason) == (whole.text, whole.finish_reason)


def test_a_limit_that_is_reached_already_ends_at_once():
    turn = make_turn(max_new_tokens=2)
    feed(turn, [1, 2])
    turn.reopen(2, PROMPT_TOKENS + 2, MAX_CONTEXT)
    assert turn.finish_reason == "length"
    turn.reopen(5, PROMPT_TOKENS + 2, PROMPT_TOKENS + 1)
    assert turn.finish_reason == "context"
    turn.reopen(5, PROMPT_TOKENS + 2, PROMPT_TOKENS + 2)
    assert turn.finish_reason is None
    assert feed(turn, [3, 4, 5, 6]) == [3, 4, 5]


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_new_tokens", 0), ("max_new_tokens", 1.5), ("logprobs", 65), ("sampling", 1), ("stop", [VOCABULARY])],
)
def test_options_that_are_not_allowed_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        make_turn(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("sampling", {"heat": 1}), ("max_new_tokens", -1), ("tokens", ["a"]), ("held", [[1]]), ("count", None)],
)
def test_descriptions_of_another_form_are_refused(name, value):
    described = make_turn().describe()
    for changed in (described | {name: value}, {key: described[key] for key in described if key != name}):
        with pytest.raises(ContractMismatchError, match="saved generation"):
            Turn.from_description(changed, VOCABULARY)


def test_a_described_stop_text_needs_a_tokenizer(tokenizer):
    described = make_turn(tokenizer, stop=["a"]).describe()
    with pytest.raises(ConfigError, match="tokenizer"):
        Turn.from_description(described, VOCABULARY)


def test_without_a_tokenizer_there_is_no_text():
    turn = make_turn()
    feed(turn, np.arange(50).tolist())
    assert (turn.text, turn.stop_text, turn.shown_tokens, turn.count) == (None, None, list(range(50)), 50)


def test_without_stop_texts_the_text_is_that_of_the_shown_tokens(tokenizer):
    turn = make_turn(tokenizer, stop=[[20, 21]])
    assert feed(turn, [10, 11, 20]) == [10, 11]
    assert (turn.text, turn.stop_text) == (tokenizer.decode([10, 11]), None)
    turn = revive(turn, tokenizer)
    assert feed(turn, [12]) == [20, 12]
    assert turn.text == tokenizer.decode([10, 11, 20, 12])
