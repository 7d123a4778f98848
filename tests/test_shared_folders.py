"""Folders that the processes of a run share."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shared_folders import shared


@pytest.fixture
def name(tmp_path):
    """A name that no other test asks for."""
    return str(tmp_path)


def test_a_folder_is_made_once(name):
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        folder.mkdir()
        (folder / "file").write_text(name)

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: shared(name, make), range(32)))
    assert len(made) == len(set(folders)) == 1
    assert [path.name for path in folders[0].iterdir()] == ["file"]
    assert shared(f"{name} other", make) != folders[0]


def test_a_folder_whose_making_failed_is_made_again(name):
    def fail(folder: Path) -> None:
        folder.mkdir()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        shared(name, fail)
    assert list(shared(name, Path.mkdir).iterdir()) == []
