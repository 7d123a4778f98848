"""The shipped model, exported once by the command line itself, and a text for it to read."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chats import TEMPLATE
from shared_folders import shared

import ortolan
from ortolan.cli import main
from ortolan.retrieval import Sample, Task, load_corpus, make_sample, shipped_model


def _export(*options: str) -> Path:
    def make(folder: Path) -> None:
        sizes = ["--max-context", "4096", "--chunk-size", "256"]
        assert main(["export", str(shipped_model()), str(folder), *sizes, *options]) == 0

    return shared(f"command line {options}", make)


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """Heed signals that a shell's background job (SIGINT) or nohup (SIGHUP) starts pytest without."""
    before = {
        number: signal.signal(number, handler)
        for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL))
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return _export()


@pytest.fixture(scope="session")
def paged_dir() -> Path:
    return _export("--paged", "--page-size", "128")


@pytest.fixture(scope="session")
def sample() -> Sample:
    return make_sample(load_corpus("eval"), Task(length=2048, depth=0.4, seed=11))


@pytest.fixture(scope="session")
def prompt_file(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    path.write_text(sample.prompt, encoding="utf-8")
    return path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must be refused with exit code 2 and one line; returns the line."""

    def run(*arguments: str) -> str:
        capsys.readouterr()  # of what fixtures have written
        try:
            code = main(list(arguments))
        except SystemExit as stopped:  # argparse's own
            code = stopped.code
        output = capsys.readouterr()
        assert code == 2
        assert output.out == ""
        assert output.err.startswith("ortolan: error: ")
        assert output.err.count("\n") == 1
        return output.err

    return run


@pytest.fixture
def chat_dir(model_dir: Path, tmp_path: Path) -> Path:
    """Return a copy of the shipped model with a chat template that its export knows nothing of."""
    return _with_template(model_dir, tmp_path / "chat model")


@pytest.fixture
def endless_dir(tmp_path: Path) -> Path:
    """Return a chat model whose answers take seconds, so that an interrupt finds them under way."""
    return _with_template(_export("--max-context", "65536"), tmp_path / "endless model")


def _with_template(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def chat_model(chat_dir: Path) -> ortolan.Model:
    return ortolan.load(chat_dir, device="cpu")
