"""Messages of commands say what was given, what is allowed, and what to do; options that do nothing are named."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import foreign
import pytest
from families import shared_checkpoint
from foreign import Foreign

import ortolan
from ortolan.cli import main
from ortolan.custom_ops import LibraryInfo
from ortolan.errors import ContextLengthError
from ortolan.retrieval import shipped_model

COMMANDS = ("export", "convert", "generate", "chat", "serve", "batch", "inspect", "bench", "demo", "perplexity")
ADDRESS_SPACE = 64 * 2**30  # bytes; far more than a process needs, far fewer than its caches ask for


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_default(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out.split("examples:")[0]
    options = re.split(r"^  (?=-)", text, flags=re.MULTILINE)[1:]
    assert options
    for option in options:
        names = re.split(r"\s{2,}", option)[0]
        takes_a_value = len(names.split(",")[-1].split()) > 1
        assert "default" in option or not takes_a_value, option


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_points_to_the_help_of_its_command(command, refused):
    count = {"demo": 0, "export": 2, "convert": 2, "perplexity": 2, "batch": 3}.get(command, 1)
    line = refused(command, *["a"] * count, "--no-such-option")
    assert "unrecognized arguments: --no-such-option" in line
    assert line.endswith(f"see `ortolan {command} --help`\n")


def test_an_option_that_is_nearly_one_is_corrected(refused):
    assert "--max-contxt=5 (did you mean --max-context?)" in refused("generate", "a", "--max-contxt=5")


def test_a_context_that_is_exceeded_says_where_to_change_it(model_dir, refused):
    line = refused("generate", str(model_dir), "--prompt", "x" * 65, "--max-context", "64", "--device", "cpu")
    assert "past max_context = 64" in line
    assert "make the session with a larger max_context, at most the model's 4096 (--max-context)" in line
    line = refused("generate", str(model_dir), "--prompt", "x" * 5000, "--device", "cpu")
    assert "make its folder again with a larger max_context (--max-context of `ortolan export` or `convert`)" in line
    line = refused("generate", str(model_dir), "--prompt", "x", "--max-context", "5000", "--device", "cpu")
    assert "max_context 5000 is more than the 4096 that the model was made for; give at most that, or make its" in line


def test_an_engine_says_it_too(paged_dir):
    model, match = (
        ortolan.load(paged_dir, device="cpu"),
        "make the engine with a larger max_context, at most the model's",
    )
    with (
        ortolan.Engine(model, max_sequences=1, max_context=256) as engine,
        pytest.raises(ContextLengthError, match=match),
    ):
        engine.submit([1] * 257, max_new_tokens=1)


def test_a_text_that_ends_at_the_context_limit_says_so(model_dir, capsys):
    options = ["--max-context", "64", "--max-new-tokens", "90", "--device", "cpu"]
    assert main(["generate", str(model_dir), "--prompt", "def " * 15, *options]) == 0
    warning = "ortolan: warning: the text ended at max_context = 64; make the session with a larger max_context"
    assert capsys.readouterr().err.startswith(warning)
    assert main(["generate", str(model_dir), "--prompt", "def ", "--max-new-tokens", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().err == ""


def test_cuda_on_a_build_for_the_cpu_says_how_to_rebuild(model_dir, refused, monkeypatch):
    info = LibraryInfo(version=ortolan.__version__, providers=("cpu",))
    monkeypatch.setattr("ortolan.runtime.device.providers.library_info", lambda: info)
    line = refused("generate", str(model_dir), "--prompt", "x", "--device", "cuda")
    assert "built without CUDA kernels; put nvcc on the path and run `pip install . -C cmake.define" in line
    assert "in Ortolan's source folder, or use the CPU (device='cpu', --device cpu)" in line


def test_no_memory_for_caches_names_the_option(tmp_path):
    options = ["--weights", "random", "--max-context", str(10**9)]
    assert main(["export", str(shipped_model()), str(tmp_path / "model"), *options]) == 0
    result = subprocess.run(
        [sys.executable, "-m", "ortolan", "generate", str(tmp_path / "model"), "--prompt", "x", "--device", "cpu"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    (line,) = result.stderr.splitlines()
    assert "there is no memory for the caches of max_context 1000000000" in line
    assert "lower max_context (--max-context)" in line
    assert result.returncode == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--top-p", "0.9"], "--top-p has no effect without --temperature above 0"),
        (["--top-k", "5", "--seed", "1"], "--top-k, --seed have no effect without --temperature above 0"),
        (["--min-p", "0.1"], "--min-p has no effect"),
        (["--top-p", "0.9", "--temperature", "1", "--seed", "1"], None),
        (["--repetition-penalty", "1.2"], None),
    ],
)
def test_sampling_without_a_temperature_is_named(options, named, model_dir, capsys):
    arguments = ["--prompt", "def ", "--max-new-tokens", "1", "--device", "cpu"]
    assert main(["generate", str(model_dir), *arguments, *options]) == 0
    errors = capsys.readouterr().err
    assert errors == "" if named is None else errors.startswith(f"ortolan: warning: {named}")


@pytest.mark.parametrize("command", ["export", "convert"])
def test_a_page_size_without_pages_is_named(command, tmp_path, capsys):
    source = shipped_model() if command == "export" else foreign.write(Foreign(), tmp_path / "source")
    options = ["--max-context", "64", "--page-size", "32"]
    assert main([command, str(source), str(tmp_path / "plain"), *options]) == 0
    assert capsys.readouterr().err == "ortolan: warning: --page-size has no effect without --paged\n"
    assert main([command, str(source), str(tmp_path / "paged"), *options, "--paged"]) == 0
    assert capsys.readouterr().err == ""


def test_a_sink_without_windows_is_named(tmp_path, capsys):
    source = foreign.write(Foreign(), tmp_path / "source")
    checkpoint = shared_checkpoint("llama")
    options = ["--max-context", "64", "--sink", "4"]
    for command, given in (("convert", source), ("export", checkpoint)):
        assert main([command, str(given), str(tmp_path / command), *options]) == 0
        assert "ortolan: warning: sink 4 has no effect: no layer of the model has a window" in capsys.readouterr().err
    rings = foreign.write(Foreign(windows=(12, -1)), tmp_path / "rings")
    assert main(["convert", str(rings), str(tmp_path / "model"), *options]) == 0
    assert capsys.readouterr().err == ""


def test_a_window_of_none_is_named(tmp_path, capsys):
    source = foreign.write(Foreign(), tmp_path / "source")
    assert main(["convert", str(source), str(tmp_path / "model"), "--sliding-window", "0"]) == 0
    assert "ortolan: warning: --sliding-window 0 has no effect" in capsys.readouterr().err


def test_the_context_of_an_export_is_the_models_own_or_32768(tmp_path, capsys):
    for own, wanted in ((512, 512), (100_000, 32768)):
        checkpoint = tmp_path / f"checkpoint-{own}"
        checkpoint.mkdir()
        config = json.loads((shipped_model() / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(config | {"max_position_embeddings": own}))
        target = tmp_path / f"model-{own}"
        assert main(["export", str(checkpoint), str(target), "--weights", "random"]) == 0
        assert json.loads((target / "ortolan.json").read_text())["max_context"] == wanted
    assert capsys.readouterr().err == ""


class TestTokenizers:
    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        for path in shipped_model().iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        return folder

    def test_a_missing_one_is_a_warning(self, checkpoint, tmp_path, capsys):
        (checkpoint / "tokenizer.json").unlink()
        (checkpoint / "tokenizer.model").touch()
        assert main(["export", str(checkpoint), str(tmp_path / "model"), "--max-context", "64"]) == 0
        line = capsys.readouterr().err
        assert line.startswith(f"ortolan: warning: {checkpoint} has no tokenizer.json, so that the model will take and")
        assert "make one of tokenizer.model: `AutoTokenizer" in line

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    @pytest.mark.parametrize("content", ['{"model": ', "[]", '"x"'])
    def test_a_broken_one_is_an_error_before_anything_is_written(self, checkpoint, tmp_path, refused, name, content):
        (checkpoint / name).write_text(content)
        assert str(checkpoint / name) in refused("export", str(checkpoint), str(tmp_path / "model"))
        assert not (tmp_path / "model").exists()

    def test_conversions_say_it_too(self, tmp_path, refused):
        source = foreign.write(Foreign(), tmp_path / "source")
        (source / "tokenizer.json").write_text("{}")
        assert str(source / "tokenizer.json") in refused("convert", str(source), str(tmp_path / "model"))
        (source / "tokenizer.json").unlink()
        with pytest.warns(UserWarning, match=r"has no tokenizer\.json"):
            ortolan.convert(source, tmp_path / "model")
