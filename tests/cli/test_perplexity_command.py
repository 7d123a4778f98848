"""`ortolan perplexity`: equal to its definition over the logits of single steps, and clear about bad input."""

import json
import math

import numpy as np
import pytest
from tolerances import FLOAT32_SUMS

import ortolan
from ortolan.cli import main
from ortolan.errors import ConfigError
from ortolan.runtime.perplexity import measure_perplexity

WINDOWS = [(64, None), (64, 32), (64, 63), (64, 1), (50, 7), (2, 1), (199, 198), (200, 100), (4096, 4000)]


@pytest.fixture(scope="module")
def model(model_dir):
    return ortolan.load(model_dir, device="cpu")


@pytest.fixture(scope="module")
def text(sample):
    return sample.prompt[:200]


@pytest.fixture
def text_file(text, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    return path


def log_probabilities(model, tokens: list[int]) -> np.ndarray:
    """Feed tokens one by one; returns the log-probability of each but the first, [T - 1] float64."""
    session = model.session()
    rows = np.array([session.step(token) for token in tokens[:-1]], np.float64)
    peaks = rows.max(axis=1)
    chosen = rows[np.arange(len(rows)), tokens[1:]]
    return chosen - peaks - np.log(np.exp(rows - peaks[:, None]).sum(axis=1))


def by_definition(model, tokens: list[int], window: int, stride: int) -> float:
    """Predict each token in the first window that holds it; returns the negative log-likelihood."""
    windows = {}
    for position in range(1, len(tokens)):
        begin = stride * max(0, math.ceil((position - window + 1) / stride))
        windows.setdefault(begin, []).append(position)
    total = 0.0
    for begin, positions in windows.items():
        known = log_probabilities(model, tokens[begin : positions[-1] + 1])
        total -= sum(known[position - begin - 1] for position in positions)
    return total


def test_one_window_equals_the_steps_logits(model, model_dir, text, text_file, capsys):
    tokens = model.tokenizer.encode(text)
    expected = -log_probabilities(model, tokens).sum()
    assert main(["perplexity", str(model_dir), str(text_file), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == len(tokens) - 1
    assert report["negative_log_likelihood"] == pytest.approx(expected, rel=FLOAT32_SUMS)
    assert report["perplexity"] == pytest.approx(math.exp(expected / (len(tokens) - 1)), rel=FLOAT32_SUMS)
    assert report["bits_per_byte"] == pytest.approx(expected / math.log(2) / len(text.encode()), rel=FLOAT32_SUMS)


@pytest.mark.parametrize(("window", "stride"), WINDOWS)
def test_strided_windows_equal_their_definition(model, text, window, stride):
    tokens, predicted = model.tokenizer.encode(text), []
    measured = measure_perplexity(model, tokens, window, stride, predicted.append)
    expected = by_definition(model, tokens, window, window // 2 if stride is None else stride)
    assert measured.tokens == sum(predicted) == len(tokens) - 1
    assert measured.negative_log_likelihood == pytest.approx(expected, rel=FLOAT32_SUMS)
    assert measured.perplexity == pytest.approx(math.exp(expected / measured.tokens), rel=FLOAT32_SUMS)


def test_a_text_longer_than_the_context_is_read_in_windows_of_it(model, sample):
    """4096 tokens of context; the second window begins in the middle of the first."""
    tokens = model.tokenizer.encode(sample.prompt * 3)[:5000]
    halves = measure_perplexity(model, tokens)
    assert halves == measure_perplexity(model, tokens, 4096, 2048)
    assert halves.tokens == 4999


def test_a_window_of_the_command_is_that_of_the_api(model, model_dir, text, text_file, tmp_path, capsys):
    measured = measure_perplexity(model, model.tokenizer.encode(text), 64, 16)
    options = ["--window", "64", "--stride", "16", "--json", str(tmp_path / "report.json")]
    assert main(["perplexity", str(model_dir), str(text_file), *options]) == 0
    output, report = capsys.readouterr(), json.loads((tmp_path / "report.json").read_text())
    assert report["perplexity"] == pytest.approx(measured.perplexity)
    assert (report["model"], report["file"]) == (str(model_dir), str(text_file))
    assert output.out == f"perplexity {report['perplexity']:.4f} over {report['tokens']} tokens\n"
    assert output.err == ""


def test_a_byte_order_mark_is_not_predicted(model, model_dir, text, tmp_path, capsys):
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert main(["perplexity", str(model_dir), str(tmp_path / "marked"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == len(model.tokenizer.encode(text)) - 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"x", "one token"),
        ("na\u00efve".encode("latin-1"), "cannot be read: 'utf-8' codec"),
        (None, "cannot be read"),
        ("folder", "cannot be read"),
    ],
)
def test_a_file_without_a_text_is_one_line(model_dir, tmp_path, refused, content, named):
    path = tmp_path / "text.txt"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    assert named in refused("perplexity", str(model_dir), str(path))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--window", "1"], "window is 1"),
        (["--window", "-5"], "window is -5"),
        (["--window", "4097"], "window is 4097"),
        (["--window", "many"], "--window: invalid int value: 'many'"),
        (["--stride", "0"], "stride is 0"),
        (["--stride", "-1"], "stride is -1"),
        (["--window", "64", "--stride", "64"], "stride is 64; it must be less than the window, 64"),
        (["--window", "64", "--stride", "65"], "stride is 65"),
        (["--device", "tpu"], "tpu"),
        (["--json", ""], "has no name"),
        (["--json", "/none/report.json"], "/none"),
        (["--json", "/tmp"], "/tmp"),
    ],
)
def test_bad_options_are_one_line(model_dir, text_file, refused, arguments, named):
    assert named in refused("perplexity", str(model_dir), str(text_file), *arguments)


def test_a_missing_model_is_one_line(tmp_path, text_file, refused):
    assert str(tmp_path / "none") in refused("perplexity", str(tmp_path / "none"), str(text_file))


def test_a_report_is_refused_before_the_work(model_dir, text_file, refused, monkeypatch):
    monkeypatch.setattr(ortolan, "load", lambda *_, **__: pytest.fail("loaded a model"))
    refused("perplexity", str(model_dir), str(text_file), "--json", "/none/report.json")


@pytest.mark.parametrize("tokens", [[], [5], [5, 10**6], "text", [5.5, 6.5]])
def test_tokens_that_cannot_be_measured(model, tokens):
    with pytest.raises(ConfigError, match="token"):
        measure_perplexity(model, tokens)
