"""Files that may not be read, targets that may not be, and disks that are too small are named by typed errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import foreign
import pytest
from byte_tokenizer import write_byte_tokenizer
from families import tiny_checkpoint
from foreign import Foreign
from unreadable import make_unreadable

import ortolan
from ortolan.cli import main
from ortolan.errors import CheckpointError, ConfigError, StorageError
from ortolan.export.weights import WEIGHTS_FILE

CHECKPOINT_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tiny_checkpoint("qwen3", tmp_path / "hf")
    (folder / "generation_config.json").write_text("{}")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return foreign.write(Foreign(), tmp_path / "source")


@pytest.fixture
def refused(tmp_path, capsys):
    """Run a command that must fail by exit code 2 and one line, and write nothing; returns the line."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 2
        output = capsys.readouterr()
        assert output.err.startswith("ortolan: error: ")
        assert output.err.count("\n") == 1
        assert {path.name for path in tmp_path.iterdir()} <= {"hf", "source", "kept"}
        return output.err

    return run


@pytest.mark.parametrize("name", [*CHECKPOINT_FILES, INDEX])
def test_a_checkpoint_file_that_may_not_be_read_is_named(checkpoint, tmp_path, monkeypatch, refused, name):
    if name == INDEX:
        (checkpoint / "model.safetensors").rename(checkpoint / INDEX)
    (checkpoint / name).touch()
    make_unreadable(checkpoint / name, monkeypatch)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied") as caught:
        ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert str(caught.value).startswith(f"{checkpoint / name} ")
    assert str(checkpoint / name) in refused("export", checkpoint, tmp_path / "model", "--max-context", 64)


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "genai_config.json", "tokenizer.json"])
def test_a_source_file_that_may_not_be_read_is_named(source, tmp_path, monkeypatch, refused, name):
    (source / name).touch()
    make_unreadable(source / name, monkeypatch)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied") as caught:
        ortolan.convert(source, tmp_path / "model", max_context=64)
    assert str(caught.value).startswith(f"{source / name} ")
    assert str(source / name) in refused("convert", source, tmp_path / "model", "--max-context", 64)


@pytest.mark.parametrize("command", ["export", "convert"])
def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch, refused, request, command):
    folder = request.getfixturevalue({"export": "checkpoint", "convert": "source"}[command])
    make_unreadable(folder, monkeypatch)
    line = refused(command, folder, tmp_path / "model")
    assert str(folder) in line
    assert "cannot be read: Permission denied" in line


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["new", "overwrite"])
def test_a_target_that_may_not_be_read_is_no_target(checkpoint, tmp_path, monkeypatch, refused, overwrite):
    folder = ortolan.export(checkpoint, tmp_path / "kept", max_context=64)
    make_unreadable(folder, monkeypatch)
    line = refused("export", checkpoint, folder, "--max-context", 64, *overwrite)
    assert f"{folder} cannot be read: Permission denied" in line


def test_the_demo_names_a_folder_that_it_may_not_read(tmp_path, monkeypatch, refused):
    (tmp_path / "kept").mkdir()
    make_unreadable(tmp_path / "kept", monkeypatch)
    line = refused("demo", "--length", 600, "--keep-dir", tmp_path / "kept")
    assert f"--keep-dir {tmp_path / 'kept'} cannot be read: Permission denied" in line


@pytest.mark.parametrize("make", [ortolan.export, ortolan.convert], ids=["export", "convert"])
class TestDisk:
    """A disk is asked for room before anything is written to it."""

    def folder(self, make, request) -> Path:
        return request.getfixturevalue("source" if make is ortolan.convert else "checkpoint")

    def test_too_little_room_is_found_before_anything_is_written(self, make, request, tmp_path, monkeypatch):
        given = self.folder(make, request)
        size = (make(given, tmp_path / "first", max_context=64) / WEIGHTS_FILE).stat().st_size
        before = sorted(tmp_path.rglob("*"))
        usage = type(shutil.disk_usage(tmp_path))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**15, 10**15, size - 1))
        monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("made a folder"))
        with pytest.raises(StorageError, match=rf"take {size} bytes.* {size - 1} free; free 1 more"):
            make(given, tmp_path / "new" / "model", max_context=64)
        assert sorted(tmp_path.rglob("*")) == before

    @pytest.mark.parametrize("numbers", ["enough", "none"])
    def test_room_for_the_weights_is_enough(self, make, request, tmp_path, monkeypatch, numbers):
        given = self.folder(make, request)
        size = (make(given, tmp_path / "first", max_context=64) / WEIGHTS_FILE).stat().st_size
        usage = type(shutil.disk_usage(tmp_path))
        disk = usage(10**15, 10**15 - size, size) if numbers == "enough" else usage(0, 0, 0)  # as some systems say
        monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
        assert (make(given, tmp_path / "new" / "model", max_context=64) / WEIGHTS_FILE).stat().st_size == size


@pytest.mark.parametrize("make", [ortolan.export, ortolan.convert], ids=["export", "convert"])
@pytest.mark.parametrize("progress", [5, "print", [], 0])
def test_progress_that_is_no_function_is_refused_before_anything_is_read(make, progress, tmp_path):
    with pytest.raises(ConfigError, match=r"progress is .*must be a function"):
        make(tmp_path / "absent", tmp_path / "model", progress=progress)
    assert list(tmp_path.iterdir()) == []


def test_warnings_point_at_the_callers_line(checkpoint, source, tmp_path):
    write_byte_tokenizer(checkpoint)
    (source / "genai_config.json").write_text('{"model": {"context_length": 32}}')
    calls = {
        "max_position_embeddings": lambda: ortolan.export(checkpoint, tmp_path / "model", max_context=10**6),
        "context_length": lambda: ortolan.convert(source, tmp_path / "other", max_context=64),
    }
    for named, call in calls.items():
        with pytest.warns(UserWarning, match=named) as caught:
            call()
        assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, call.__code__.co_firstlineno)]
