"""A folder as a reader of the documents has it: a checkpoint, a text, models, and the command on the path."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import foreign
import pytest
from foreign import Foreign
from shared_folders import shared

import ortolan
from ortolan.retrieval import shipped_model

REPORT = "The bridge was built in 1931.\n" * 90 + "Ada Lovelace wrote this report. It cost 300 crowns.\n"


@pytest.fixture(scope="session")
def exported() -> Path:
    """Return the shipped model, exported with chunks that a test reads quickly."""
    return shared("documents", lambda folder: ortolan.export(shipped_model(), folder, chunk_size=512))


@pytest.fixture
def foreign_folder(tmp_path: Path) -> Path:
    """Write a tiny model as onnxruntime-genai's builder does."""
    return foreign.write(Foreign(windows=(12, -1)), tmp_path / "source")


@pytest.fixture
def workplace(tmp_path: Path, exported: Path, foreign_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder that the documents speak of, and work in it."""
    (tmp_path / "checkpoint").symlink_to(shipped_model())
    (tmp_path / "model").symlink_to(exported)
    (tmp_path / "report.txt").write_text(REPORT, encoding="utf-8")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, options in (("ortolan", "-m ortolan "), ("python", "")):
        script = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {options}"$@"\n'
        (commands / name).write_text(script, encoding="utf-8")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(commands), os.environ["PATH"]]))
    monkeypatch.chdir(tmp_path)
    return tmp_path
