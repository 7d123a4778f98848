"""Files of reports: a report that cannot be written leaves what was there, and a name may lead to anything."""

import contextlib
import errno
import json
import os
import resource
import stat
import subprocess
import sys
import threading

import pytest

from ortolan.cli.report import write_report
from ortolan.errors import StorageError

REPORT = {"perplexity": 2.5, "tokens": 100}


@contextlib.contextmanager
def full_disk():
    """Let files take a few bytes only."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("before", [None, "an earlier report"])
def test_a_full_disk_leaves_what_was_there(tmp_path, before):
    target = tmp_path / "report.json"
    if before is not None:
        target.write_text(before)
    with full_disk(), pytest.raises(StorageError, match=r"report\.json cannot be written"):
        write_report(str(target), REPORT, sys.stdout)
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == ({} if before is None else {target.name: before})


def test_a_report_takes_the_place_and_the_mode_of_what_a_link_leads_to(tmp_path):
    target, link = tmp_path / "reports" / "a.json", tmp_path / "link.json"
    target.parent.mkdir()
    target.write_text("before " * 100)
    target.chmod(0o640)
    link.symlink_to(target)
    write_report(str(link), REPORT, sys.stdout)
    assert json.loads(target.read_text()) == REPORT
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert list(target.parent.iterdir()) == [target]


def test_a_file_that_cannot_be_replaced_is_written(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "replace", refuse)
    target = tmp_path / "report.json"
    target.write_text("before " * 100)
    write_report(str(target), REPORT, sys.stdout)
    assert json.loads(target.read_text()) == REPORT
    assert list(tmp_path.iterdir()) == [target]


def test_a_pipe_stays_one(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_report(str(pipe), REPORT, sys.stdout)
    reader.join()
    assert json.loads(read[0]) == REPORT
    assert list(tmp_path.iterdir()) == [pipe]


def test_what_a_shell_has_opened_is_written_to(tmp_path):
    program = (
        "import sys; from ortolan.cli.report import write_report; write_report('/dev/stdout', {}, sys.stdout); print(1)"
    )
    with open(tmp_path / "out", "ab") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, check=True, timeout=60)
    assert (tmp_path / "out").read_text() == "{}\n1\n"
