"""Exports calibrated on a text: outputs are nearer than those of the data-free search, and bad calls leave nothing."""

import shutil

import numpy as np
import pytest
from families import tiny_checkpoint

import ortolan
from ortolan.cli import main
from ortolan.errors import ConfigError
from ortolan.retrieval import shipped_model

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 384}
TEXT = "def area(width, height):\n    return width * height\n" * 20


@pytest.fixture
def source(tmp_path):
    folder = tiny_checkpoint("llama", tmp_path / "hf", **SIZES)
    for file in shipped_model().glob("tokenizer*"):
        shutil.copy(file, folder / file.name)
    return folder


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def logits(folder):
    model = ortolan.load(folder, device="cpu")
    session, token_ids = model.session(), model.tokenizer.encode(TEXT[:120])
    return np.stack([session.prefill([token]) for token in token_ids])


@pytest.mark.parametrize(
    "options",
    [
        {"weight_format": "int4", "group_size": 32},
        {"weight_format": "int4", "group_size": 128, "asymmetric": True},
        {"weight_format": "int8", "group_size": "channel"},
    ],
)
def test_a_calibrated_model_is_nearer_to_the_dense_one(options, source, text, tmp_path):
    exact = logits(ortolan.export(source, tmp_path / "dense", max_context=128))
    common = {"max_context": 128, "head_format": "dense", **options}
    searched = ortolan.export(source, tmp_path / "searched", **common)
    calibrated = ortolan.export(source, tmp_path / "calibrated", quantizer="gptq", calibration=text, **common)
    errors = [np.square(logits(folder) - exact).mean() for folder in (calibrated, searched)]
    assert errors[0] < (0.7 if options["weight_format"] == "int4" else 1.0) * errors[1]
    assert (calibrated / "model.onnx.data").stat().st_size == (searched / "model.onnx.data").stat().st_size


def test_the_command_line_calibrates(source, text, tmp_path):
    options = ["--weight-format", "int4", "--quantizer", "gptq", "--calibration", str(text), "--max-context", "128"]
    assert main(["export", str(source), str(tmp_path / "out"), *options]) == 0
    expected = ortolan.export(
        source, tmp_path / "same", weight_format="int4", quantizer="gptq", calibration=text, max_context=128
    )
    np.testing.assert_array_equal(logits(tmp_path / "out"), logits(expected))


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        ({"quantizer": "gptq"}, None, "need each other"),
        ({"quantizer": "search"}, TEXT, "need each other"),
        ({"quantizer": "gptq", "weight_format": "mxfp4"}, TEXT, "for weight_format int4 and int8, not 'mxfp4'"),
        ({"quantizer": "gptq", "weights": "random"}, TEXT, "weights is 'random'"),
        ({"quantizer": "gptq"}, "", "is empty"),
        ({"quantizer": "gptq"}, "short", "at least 128 are needed"),
        ({"quantizer": "gptq", "calibration": "missing.txt"}, None, "cannot be read"),
    ],
)
def test_calls_that_do_not_fit_are_refused(options, content, message, source, text, tmp_path):
    if content is not None:
        text.write_text(content)
        options = {"calibration": text, **options}
    before = set(tmp_path.iterdir())
    with pytest.raises(ConfigError) as error:
        ortolan.export(source, tmp_path / "out", **{"weight_format": "int4", **options})
    assert message in str(error.value)
    assert set(tmp_path.iterdir()) == before


def test_a_checkpoint_without_a_tokenizer_is_refused(source, text, tmp_path):
    (source / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ortolan.export(source, tmp_path / "out", weight_format="int4", quantizer="gptq", calibration=text)
    assert not (tmp_path / "out").exists()
