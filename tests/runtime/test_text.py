"""Text comes out in whole characters, and ends before a stop string."""

import pytest
from byte_tokenizer import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from ortolan.runtime import stream_text
from ortolan.runtime.tokenizer import Tokenizer

from ortolan.errors import ConfigError, ContractMismatchError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_no_half_character_is_emitted(tokenizer):
    ids = tokenizer.encode("aé€😀b")
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) == "aé€😀b"
    assert [p for p in pieces if p] == ["a", "é", "€", "😀", "b"]
    assert stream.finish() == ""


def test_bytes_that_never_become_a_character_come_out_at_the_end(tokenizer):
    stream = tokenizer.stream()
    assert [stream.push(i) for i in tokenizer.encode("x€")[:-1]] == ["x", "", ""]
    assert stream.finish() == "\ufffd"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_make_the_text(tmp_path_factory, text):
    tokenizer = byte_tokenizer(tmp_path_factory.getbasetemp())
    assert "".join(stream_text(tokenizer, tokenizer.encode(text))) == text


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello END more", ["END"], "hello "),
        ("hello EN", ["END"], "hello EN"),
        ("aXbYc", ["Y", "X"], "a"),
        ("ababac", ["abac"], "ab"),
        ("END", ["END"], ""),
    ],
)
def test_stop_strings(tokenizer, text, stop, expected):
    pieces = []
    for piece in stream_text(tokenizer, tokenizer.encode(text), stop):
        pieces.append(piece)
        assert expected.startswith("".join(pieces)), "part of a stop string was emitted"
    assert "".join(pieces) == expected


def test_generation_is_not_asked_for_more_after_a_stop(tokenizer):
    ids = iter(tokenizer.encode("one. two. three."))
    assert "".join(stream_text(tokenizer, ids, ["."])) == "one"
    assert len(list(ids)) == len(" two. three.")


def test_empty_stop_strings_and_missing_files_are_refused(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="empty"):
        list(stream_text(tokenizer, [], [""]))
    with pytest.raises(ContractMismatchError, match="tokenizer.json"):
        Tokenizer(tmp_path)


def test_chat_templates(tmp_path):
    plain = byte_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="no chat template"):
        plain.apply_chat_template([{"role": "user", "content": "x"}])
    template = (
        "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no bad role') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    chat = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    assert chat.apply_chat_template(messages, tokenize=False) == "<user>hi\n<assistant>"
    assert chat.decode(chat.apply_chat_template(messages, add_generation_prompt=False)) == "<user>hi\n"
    with pytest.raises(ConfigError, match="no bad role"):
        chat.apply_chat_template([{"role": "bad", "content": ""}])
