"""A tokenizer that its library panics on ends in an error that can be caught, and fails whom it concerns alone."""

import json
import os
import shutil
import tempfile

import pytest
from families import shared_checkpoint, shared_model
from hostile_tokenizers import AT_ENCODE, AT_LOAD, STRIP, write_tokenizer

import ortolan
from ortolan.errors import ConfigError, ContractMismatchError, EngineClosedError
from ortolan.manifest import MANIFEST_FILE
from ortolan.runtime.text.failures import STDERR
from ortolan.runtime.text.tokenizer import TRIED_IDS, Tokenizer

VOCABULARY = TRIED_IDS + 100
CONTEXT = {"max_context": 64, "chunk_size": 16}


@pytest.mark.parametrize("name", AT_LOAD)
def test_a_file_that_panics_is_refused_without_a_backtrace(tmp_path, name, capfd):
    write_tokenizer(tmp_path, AT_LOAD[name])
    with pytest.raises(ContractMismatchError, match=r"tokenizer\.json is not a tokenizer: "):
        Tokenizer(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_needs_no_folder_for_temporary_files(tmp_path, monkeypatch):
    write_tokenizer(tmp_path, {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert Tokenizer(tmp_path).decode([1]) == "word1"


def test_standard_error_that_takes_nothing_keeps_no_tokenizer_from_use(tmp_path):
    write_tokenizer(tmp_path, {})
    before = os.dup(STDERR)
    try:
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), STDERR)
        assert Tokenizer(tmp_path).decode([1]) == "word1"
    finally:
        os.dup2(before, STDERR)
        os.close(before)


@pytest.mark.parametrize("name", AT_ENCODE)
def test_a_text_that_panics_is_refused(tmp_path, name):
    write_tokenizer(tmp_path, AT_ENCODE[name])
    with pytest.raises(ContractMismatchError, match=r"tokenizer\.json cannot encode 'a b': "):
        Tokenizer(tmp_path).encode("a b")


def test_ids_that_panic_are_refused(tmp_path):
    write_tokenizer(tmp_path, {"decoder": STRIP}, TRIED_IDS + 1, letter=TRIED_IDS)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode([0, 1]) == "word0word1"
    with pytest.raises(ContractMismatchError, match=rf"tokenizer\.json cannot decode \[{TRIED_IDS}\]: "):
        tokenizer.decode([TRIED_IDS])


@pytest.fixture(scope="module")
def plain_folder():
    checkpoint = shared_checkpoint("llama", seed=5, vocab_size=VOCABULARY)
    return shared_model(checkpoint, **CONTEXT, paged=True, page_size=16)


@pytest.fixture(scope="module")
def prompts(plain_folder):
    """A prompt whose continuation of three tokens has one that no trial covers, and one whose has not."""
    session = ortolan.load(plain_folder, device="cpu", num_threads=1).session()
    late = early = None
    for token in range(VOCABULARY):
        session.rewind(0)
        follow = list(session.generate([token], 3))
        if len(follow) == 3 and max(follow) >= TRIED_IDS:
            late = late or ([token], max(follow))
        elif len(follow) == 3:
            early = early or [token]
        if late and early:
            return late, early
    raise AssertionError("the model is too small")


def add_tokenizer(folder, content: dict, letter: int) -> None:
    file = write_tokenizer(folder, content, VOCABULARY, letter)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["files"][file.name] = file.stat().st_size
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


@pytest.fixture
def model(plain_folder, prompts, tmp_path):
    folder = shutil.copytree(plain_folder, tmp_path / "model")
    add_tokenizer(folder, {"decoder": STRIP}, letter=prompts[0][1])
    return ortolan.load(folder, device="cpu", num_threads=1)


def test_a_request_whose_text_fails_is_the_only_one_that_fails(model, prompts):
    (failing, _), other = prompts
    with ortolan.Engine(model) as engine:
        streams = [engine.submit(prompt, 3, stop="no such text") for prompt in (other, failing, other)]
        with pytest.raises(ContractMismatchError, match="cannot decode"):
            streams[1].result()
        assert len(streams[0].result()) == len(streams[2].result()) == 3
        assert len(engine.submit(failing, 3).result()) == 3  # of which no text is wanted
        assert engine.memory().held_bytes == 0
        assert engine.stats().failed == 1


def test_a_generation_whose_text_fails_says_so(model, prompts):
    with pytest.raises(ContractMismatchError, match="cannot decode"):
        list(model.session().generate(prompts[0][0], 3, stop="no such text"))


def test_a_tokenizer_that_panics_at_load_refuses_requests_and_leaves_the_engine_open(plain_folder, tmp_path, capfd):
    folder = shutil.copytree(plain_folder, tmp_path / "model")
    add_tokenizer(folder, {"decoder": STRIP}, letter=0)
    with ortolan.Engine(ortolan.load(folder, device="cpu", num_threads=1)) as engine:
        with pytest.raises(ConfigError, match="is not a tokenizer"):
            engine.submit([5], 3, stop="text")
        assert len(engine.submit([5], 3).result()) == 3
    with pytest.raises(EngineClosedError):
        engine.submit([5], 3)
    assert "panicked" not in capfd.readouterr().err
