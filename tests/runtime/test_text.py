"""Tokenizer, incremental decoding and stop strings, on a tokenizer of single bytes."""

import json
import re
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers

from ortolan.errors import ConfigError, ContractMismatchError
from ortolan.runtime.text.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder with nothing but a byte-level tokenizer; token 256 is special."""
    path = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HfTokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": {"content": "<bos>"}, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


@given(text=st.text(max_size=30))
def test_pieces_join_to_the_text_and_hold_no_half_character(tokenizer, text):
    stream = tokenizer.stream()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)
        assert "".join(pieces) == text


@given(ids=st.lists(st.integers(0, 255), max_size=20))
def test_bytes_that_are_no_text_end_as_when_decoded_at_once(tokenizer, ids):
    stream = tokenizer.stream()
    text = "".join([stream.push(token) for token in ids]) + stream.finish()
    whole = tokenizer.decode(ids)
    assert text.replace("\ufffd", "") == whole.replace("\ufffd", "")
    assert stream.finish() == ""


def test_a_character_comes_with_its_last_byte(tokenizer):
    stream = tokenizer.stream()
    assert [stream.push(token) for token in tokenizer.encode("a€b")] == ["a", "", "", "€", "b"]


def test_a_cut_character_comes_out_at_the_end(tokenizer):
    stream = tokenizer.stream()
    assert [stream.push(token) for token in tokenizer.encode("a€")[:-1]] == ["a", "", ""]
    assert stream.held == stream.finish() == "\ufffd"
    assert stream.held == ""


def test_special_tokens_are_left_out_unless_asked_for(tokenizer):
    ids = tokenizer.encode("<bos>hi")
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>hi"


def test_prompts_are_not_cut_off_or_padded(folder, tmp_path):
    saved = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(4)
    saved.enable_padding(length=16)
    saved.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path).encode("abcdefgh")) == 8


def test_one_id_needs_no_list(tokenizer):
    assert [tokenizer.decode(token) for token in np.array(tokenizer.encode("ab"))] == ["a", "b"]


def test_chat_template(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<bos>[user]hi[assistant]"
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode(text)
    assert not tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False).endswith(
        "[assistant]"
    )


def test_names_of_a_template_may_be_those_of_parameters(tokenizer):
    text = tokenizer.apply_chat_template(
        [], tokenize=False, chat_template="{{ self_ }}{{ cls }}{{ template }}", self=1, self_=2, cls=3, template=4
    )
    assert text == "234"


def test_a_template_may_refuse_messages(tokenizer):
    with pytest.raises(ConfigError, match="no system turn"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}])


def test_a_template_cannot_reach_python(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ConfigError, match="unsafe"):
        Tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b"\xff"),
        ("special_tokens_map.json", b"[]"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_damaged_files_are_named(folder, tmp_path, name, content):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ContractMismatchError, match=re.escape(name)):
        Tokenizer(tmp_path)


def test_missing_files_are_named(folder, tmp_path):
    with pytest.raises(ContractMismatchError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match="chat template"):
        Tokenizer(tmp_path).apply_chat_template([])


def test_special_tokens_may_have_a_file_of_their_own(folder, tmp_path):
    """transformers lets special_tokens_map.json prevail over tokenizer_config.json."""
    copy = shutil.copytree(folder, tmp_path / "tokenizer")
    template = "{{ bos_token }}|{{ eos_token }}"
    config = {"bos_token": "<old>", "eos_token": "</s>", "chat_template": template}
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    (copy / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    assert Tokenizer(copy).apply_chat_template([], tokenize=False) == "<s>|</s>"


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"], "5", None, 1.5, [[1]]], ids=str)
def test_what_are_no_ids_is_refused(tokenizer, ids):
    with pytest.raises(ConfigError, match="invalid token ids"):
        tokenizer.decode(ids)


@pytest.mark.parametrize("text", [None, 5, b"a", ["a"], "\ud800"], ids=repr)
def test_what_is_no_text_is_refused(tokenizer, text):
    with pytest.raises(ConfigError, match="is not a text"):
        tokenizer.encode(text)


def test_ids_may_be_numpys(tokenizer):
    ids = np.array(tokenizer.encode("ab"))
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids[0]) == tokenizer.decode(np.array(ids[0])) == "a"
