"""Saving a session: a whole file or what was there before, whatever the disk does."""

import builtins
import errno
import os
import resource

import numpy as np
import pytest
from saved_sessions import evicted_session

from ortolan.errors import ConfigError, StorageError
from ortolan.runtime.saved import file as session_file


@pytest.fixture
def session(mixed_model, draw_tokens):
    return evicted_session(mixed_model, draw_tokens(120))


@pytest.fixture
def path(session, tmp_path):
    session.save(tmp_path / "chat.session")
    return tmp_path / "chat.session"


class FullDisk:
    """Wraps open files so that the disk is full after some bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def open(self, *arguments, **options):
        file = builtins.open(*arguments, **options)  # noqa: SIM115
        write = file.write

        class Wrapped:
            def __enter__(wrapped):  # noqa: N805
                return wrapped

            def __exit__(wrapped, *_):  # noqa: N805
                file.close()

            def __getattr__(wrapped, name):  # noqa: N805
                return getattr(file, name)

            def write(wrapped, block):  # noqa: N805
                size = memoryview(block).nbytes
                if size > self.room:
                    write(memoryview(block)[: self.room])
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.room -= size
                return write(block)

        return Wrapped()


@pytest.mark.parametrize("room", [0, 3, 1000, 20_000, 30_000])
@pytest.mark.parametrize("existing", [True, False])
def test_a_full_disk_leaves_all_as_it_was(mixed_model, session, tmp_path, monkeypatch, draw_tokens, room, existing):
    path = tmp_path / "chat.session"
    if existing:
        path.write_bytes(b"before")
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(session_file, "open", FullDisk(room).open, raising=False)
    with pytest.raises(StorageError, match=r"chat\.session: No space left on device") as caught:
        session.save(path)
    assert isinstance(caught.value, OSError)
    monkeypatch.undo()
    assert sorted(tmp_path.iterdir()) == before
    assert not existing or path.read_bytes() == b"before"
    session.save(path)
    restored = mixed_model.restore(path)
    assert list(restored.resume()) == list(session.resume())
    np.testing.assert_array_equal(restored.prefill(draw_tokens(9)), session.prefill(draw_tokens(9)))


@pytest.mark.parametrize("limit", [0, 100, 30_000])
def test_a_limit_of_file_sizes_is_a_full_disk(session, tmp_path, limit):
    path = tmp_path / "chat.session"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            session.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    session.save(path)
    assert path.stat().st_size > limit


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_late_leaves_all_as_it_was(session, path, monkeypatch, call):
    before = path.read_bytes()
    session.rewind(0)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(session_file.os, call, fail)
    with pytest.raises(StorageError, match="Input/output error"):
        session.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_an_interrupted_save_leaves_no_file(session, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(session_file.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.save(tmp_path / "chat.session")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "error", "named"),
    [
        ("", ConfigError, "regular file"),
        ("no/folder", ConfigError, "not a folder"),
        ("a\0b", ConfigError, "null character"),
        ("n" * 300, StorageError, "long"),
    ],
)
def test_names_that_no_file_can_have(session, tmp_path, name, error, named):
    with pytest.raises(error, match=named):
        session.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_link_keeps_pointing_to_the_file(mixed_model, session, tmp_path):
    (tmp_path / "other").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "other" / "chat.session")
    session.save(link)
    assert link.is_symlink()
    assert (tmp_path / "other" / "chat.session").is_file()
    mixed_model.restore(link)
