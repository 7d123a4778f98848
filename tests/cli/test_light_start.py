"""What the package and its help texts import: little, so that they come at once."""

import subprocess
import sys

import pytest

from ortolan.cli import main

HEAVY = ("numpy", "onnx", "onnxruntime", "ml_dtypes", "tokenizers", "jinja2", "tqdm", "logging")
SHOW = "import sys; sys.stderr.write(' '.join(sorted(sys.modules)))"


def imported(code: str, folder) -> set[str]:
    process = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return set(process.stderr.split())


def test_the_package_imports_nothing_heavy(tmp_path):
    assert not imported(f"import ortolan; {SHOW}", tmp_path) & set(HEAVY)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["generate", "--help"], ["chat", "--help"], ["export", "--help"]]
)
def test_help_imports_nothing_heavy(arguments, tmp_path):
    code = f"""
from ortolan.cli import main
try:
    main({arguments})
except SystemExit as stopped:
    assert stopped.code == 0
{SHOW}"""
    modules = imported(code, tmp_path)
    assert not modules & set(HEAVY)
    assert not any(name.startswith(("ortolan.runtime", "ortolan.export", "ortolan.graphs")) for name in modules)


def test_a_session_needs_neither_an_engine_nor_onnx(model_dir, tmp_path):
    code = f"import ortolan; ortolan.load({str(model_dir)!r}, device='cpu').session().prefill([5]); {SHOW}"
    modules = imported(code, tmp_path)
    assert not modules & {"onnx", "jinja2", "asyncio", "ortolan.runtime.engine.engine"}


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_log_is_written_from_a_level_on(place, model_dir, capsys):
    level, command = ["--log-level", "info"], ["generate", str(model_dir), "--prompt", "def ", "--max-new-tokens", "2"]
    assert main([*level, *command] if place == "before" else [*command, *level]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("ortolan: info: ") for line in lines)
    assert any("opened" in line and str(model_dir) in line for line in lines)
    assert main(command) == 0
    assert capsys.readouterr().err == ""


def test_a_level_that_does_not_exist_is_one_line(model_dir, refused):
    line = refused("generate", str(model_dir), "--prompt", "x", "--log-level", "loud")
    assert "--log-level" in line
    assert "debug" in line


@pytest.mark.parametrize("command", ["generate", "bench", "perplexity"])
def test_threads_are_those_of_the_model(command, model_dir, tmp_path, refused):
    (tmp_path / "text").write_text("def f():")
    extra = {"generate": ["--prompt", "x"], "bench": [], "perplexity": [str(tmp_path / "text")]}[command]
    assert "num_threads is -1" in refused(command, str(model_dir), *extra, "--threads", "-1")


def test_threads_change_no_text(model_dir, capsys):
    texts = set()
    for threads in ("1", "2"):
        assert main(["generate", str(model_dir), "--prompt", "def ", "--threads", threads]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1
