"""Stop tokens and stop strings of an engine's requests."""

import shutil

import numpy as np
import pytest
from byte_tokenizer import write_byte_tokenizer
from fake_batch import expected_tokens, make_engine, make_manifest
from stop_reference import expected_stop, make_tokenizer

from ortolan import Engine, load
from ortolan.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_engine_ends_requests_at_stop_strings(tokenizer, runs_ahead):
    manifest = make_manifest(rings=False)
    prompts = [np.random.default_rng(i).integers(0, 50, 20 + i).tolist() for i in range(3)]
    wanted = [expected_tokens(manifest, prompt, 40) for prompt in prompts]
    text = tokenizer.decode(wanted[0])
    stop = text[12:15]
    with make_engine(manifest, runs_ahead=runs_ahead, detokenize=tokenizer.stream) as engine:
        streams = [engine.submit(prompt, 40, stop=[stop]) for prompt in prompts]
        other = engine.submit(prompts[0], 40)
        for stream, tokens in zip(streams, wanted, strict=True):
            expected, cut, count = expected_stop(tokenizer, tokens, [stop], [])
            assert (stream.result(), stream.text) == (expected, cut)
            assert stream.finish_reason == ("length" if count is None else "stop")
        assert (other.result(), other.text, other.finish_reason) == (wanted[0], text, "length")
        memory = engine.memory()
    assert streams[0].finish_reason == "stop"
    assert memory.held_bytes == 0


def test_bad_stop_strings_are_refused_by_submit(paged_model):
    with Engine(load(paged_model.folder, device="cpu", num_threads=1), 2) as engine:
        good = engine.submit([5, 6, 7], 8, ignore_eos=True)
        with pytest.raises(ConfigError, match=r"stop contains a text, but .* has no tokenizer\.json"):
            engine.submit([5, 6, 7], stop=["a"])
        with pytest.raises(ConfigError, match="empty"):
            engine.submit([5, 6, 7], stop=[""])
        assert len(good.result()) == 8


def test_stop_strings_reach_a_models_own_tokenizer(paged_model, tmp_path):
    folder = shutil.copytree(paged_model.folder, tmp_path / "model")
    write_byte_tokenizer(folder)
    model = load(folder, device="cpu", num_threads=1)
    with Engine(model, 2) as engine:
        tokens = engine.submit([5, 6, 7], 30, ignore_eos=True).result()
        stop = model.tokenizer.decode(tokens)[8:10]
        stream = engine.submit([5, 6, 7], 30, ignore_eos=True, stop=[stop])
        assert stream.result() == expected_stop(model.tokenizer, tokens, [stop], [])[0]
        assert stream.finish_reason == "stop"
        assert stop not in stream.text
