"""Copies of pages in memory and in files: what goes first, what is damaged, and who else writes there."""

import logging
import os
import threading

import numpy as np
import pytest

from ortolan.errors import ConfigError
from ortolan.runtime.caches import page_files
from ortolan.runtime.caches.page_archive import PageArchive
from ortolan.runtime.caches.page_files import DIGEST_BYTES, SUFFIX, PageFiles

PAGE_BYTES = 100


def contents(value, pages=1):
    return np.full((pages, PAGE_BYTES), value, np.uint8)


def key(number):
    return bytes([number]) * 17


def wait_for_writes(files):
    files._writer.submit(lambda: None).result()


def put(files, number, value=None, pages=1):
    files.put(key(number), contents(number if value is None else value, pages))
    wait_for_writes(files)


def path_of(folder, number):
    return folder / (key(number).hex() + SUFFIX)


def test_memory_lets_the_longest_unused_go():
    archive = PageArchive(300, None)
    for number in (1, 2, 3):
        archive.put(key(number), contents(number))
    np.testing.assert_array_equal(archive.get(key(1), PAGE_BYTES), contents(1))
    archive.touch([key(9), key(1)])
    archive.put(key(4), contents(4))
    assert [key(number) in archive for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert archive.get(key(2), PAGE_BYTES) is None
    archive.put(key(5), contents(5, pages=3))
    assert (archive.host_bytes, key(5) in archive, key(1) in archive) == (300, True, False)
    archive.put(key(6), contents(6, pages=4))  # more than there may be
    assert key(5) in archive
    assert key(6) not in archive


def test_what_is_put_twice_counts_once():
    archive = PageArchive(300, None)
    for _ in range(5):
        archive.put(key(1), contents(1))
    assert archive.host_bytes == PAGE_BYTES


def test_files_outlive_their_writer(tmp_path):
    files = PageFiles(tmp_path / "deep" / "folder", 10_000)
    put(files, 1, pages=3)
    put(files, 2)
    files.close()
    again = PageFiles(tmp_path / "deep" / "folder", 10_000)
    assert again.num_bytes == 4 * PAGE_BYTES + 2 * DIGEST_BYTES
    np.testing.assert_array_equal(again.get(key(1), PAGE_BYTES), contents(1, pages=3))
    assert key(3) not in again
    assert again.get(key(3), PAGE_BYTES) is None


def test_the_disk_lets_the_longest_unused_go_also_after_a_restart(tmp_path):
    most = 3 * (PAGE_BYTES + DIGEST_BYTES)
    files = PageFiles(tmp_path, most)
    for number in (1, 2, 3):
        put(files, number)
        os.utime(path_of(tmp_path, number), (number, number))
    files.touch([key(9), key(1)])
    files.close()
    again = PageFiles(tmp_path, most)
    put(again, 4)
    assert [path_of(tmp_path, number).exists() for number in (1, 2, 3, 4)] == [True, False, True, True]
    put(again, 5, pages=9)  # more than there may be
    assert (key(5) in again, again.num_bytes) == (False, most)
    smaller = PageFiles(tmp_path, most // 3)
    put(smaller, 6)
    assert [path.name for path in tmp_path.iterdir()] == [path_of(tmp_path, 6).name]


@pytest.mark.parametrize("damage", ["short", "altered", "empty", "renamed", "gone"])
def test_damaged_files_are_removed_and_not_used(tmp_path, caplog, damage):
    files = PageFiles(tmp_path, 10_000)
    put(files, 1)
    path = path_of(tmp_path, 1)
    data = path.read_bytes()
    if damage == "renamed":
        put(files, 2)
        path_of(tmp_path, 2).replace(path)
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"short": data[:-1], "altered": b"\0" + data[1:], "empty": b""}[damage])
    with caplog.at_level(logging.WARNING, "ortolan"):
        assert files.get(key(1), PAGE_BYTES) is None
    assert ("is damaged, and removed" in caplog.text) == (damage != "gone")
    assert not path.exists()
    assert key(1) not in files
    put(files, 1)
    np.testing.assert_array_equal(files.get(key(1), PAGE_BYTES), contents(1))


def test_pages_of_another_size_are_not_used(tmp_path):
    files = PageFiles(tmp_path, 10_000)
    put(files, 1)
    assert files.get(key(1), PAGE_BYTES - 1) is None


def test_a_disk_that_takes_nothing_is_said_once(tmp_path, monkeypatch, caplog):
    files = PageFiles(tmp_path, 10_000)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.rename", full)
    with caplog.at_level(logging.WARNING, "ortolan"):
        put(files, 1)
        put(files, 2)
    assert caplog.text.count("No space left on device") == 1
    assert (files.num_bytes, list(tmp_path.iterdir())) == (0, [])
    monkeypatch.undo()
    put(files, 1)
    assert key(1) in files


def test_what_the_disk_is_too_slow_for_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(page_files, "MOST_PENDING_BYTES", 2 * (PAGE_BYTES + DIGEST_BYTES))
    files, go_on, write = PageFiles(tmp_path, 10_000), threading.Event(), PageFiles._write

    def slow(*arguments):
        go_on.wait()
        write(*arguments)

    monkeypatch.setattr(PageFiles, "_write", slow)
    for number in (1, 2, 3):
        files.put(key(number), contents(number))
    go_on.set()
    wait_for_writes(files)
    put(files, 4)
    assert [key(number) in files for number in (1, 2, 3, 4)] == [True, True, False, True]


def test_several_may_write_to_one_folder(tmp_path):
    one, other = PageFiles(tmp_path, 10_000), PageFiles(tmp_path, 10_000)
    put(one, 1)
    put(other, 1)
    assert len(list(tmp_path.iterdir())) == 1
    path_of(tmp_path, 1).unlink()
    assert one.get(key(1), PAGE_BYTES) is None


@pytest.mark.parametrize("place", ["file", "file/folder", "/proc/none"])
def test_places_for_no_folder_are_refused(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        PageFiles(tmp_path / place, 10)
