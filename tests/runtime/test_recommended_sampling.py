"""Sampling as a checkpoint's authors recommend it, in generation_config.json of a model folder."""

import json
import logging
import shutil

import pytest

import ortolan
from ortolan import Sampling
from ortolan.errors import ContractMismatchError


@pytest.fixture
def load(full_folder, tmp_path):
    """Open a model whose generation_config.json is that text."""

    def opened(text: str | None):
        folder = shutil.copytree(full_folder, tmp_path / "model", dirs_exist_ok=True)
        (folder / "generation_config.json").write_text(text or "")
        if text is None:
            (folder / "generation_config.json").unlink()
        return ortolan.load(folder, device="cpu", num_threads=1)

    return opened


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Sampling()),
        ({"do_sample": True}, Sampling(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05},
            Sampling(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05),
        ),
        ({"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}, Sampling(repetition_penalty=1.1)),
        ({"do_sample": True, "temperature": 0.7, "top_k": None}, Sampling(temperature=0.7)),
    ],
)
def test_it_is_what_the_file_says(load, keys, expected):
    assert Sampling.from_model(load(json.dumps(keys))) == expected


def test_without_a_file_the_most_likely_token_is_taken(load):
    assert Sampling.from_model(load(None)) == Sampling()


def test_what_ortolan_does_not_have_is_named_once(load, caplog):
    used = {"do_sample": True, "temperature": 0.5, "eos_token_id": [1, 2], "max_length": 20, "num_beams": 1}
    missed = {"typical_p": 0.9, "no_repeat_ngram_size": 3, "suppress_tokens": [5]}
    model = load(json.dumps(used | missed | {"guidance_scale": None, "bad_words_ids": [], "typical_p": 0.9}))
    for _ in range(2):
        assert Sampling.from_model(model) == Sampling(temperature=0.5)
    (record,) = caplog.records
    assert (record.levelno, record.name.partition(".")[0]) == (logging.WARNING, "ortolan")
    message = record.getMessage()
    assert "generation_config.json asks for no_repeat_ngram_size, suppress_tokens, typical_p, which" in message


@pytest.mark.parametrize("text", ["{", "[]", '{"do_sample": true, "temperature": -1}', '{"repetition_penalty": "x"}'])
def test_a_file_that_is_wrong_is_named(load, text):
    with pytest.raises(ContractMismatchError, match=r"generation_config\.json"):
        Sampling.from_model(load(text))
