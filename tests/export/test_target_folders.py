"""Where a model folder may be put, and what stays of what is there."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from families import shared_checkpoint

import ortolan
from ortolan.errors import ConfigError
from ortolan.export.folder import put_in_place
from ortolan.manifest import read_manifest

PROMPT = list(range(3, 40))


@pytest.fixture
def checkpoint():
    return shared_checkpoint("qwen3")


def logits(folder):
    return ortolan.load(folder, device="cpu").session().prefill(PROMPT)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_folder_that_cannot_be_put_in_place_leaves_the_old_one(checkpoint, tmp_path, monkeypatch, when):
    target = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    before, names, rename = logits(target), sorted(target.iterdir()), Path.rename

    def fails_at(number):
        done = []

        def fail_once(path, to):
            done.append(path)
            if len(done) != number or when == "after":
                rename(path, to)
            if len(done) == number:
                raise KeyboardInterrupt

        return fail_once

    for number in range(1, 2 * len(names) + 1):
        monkeypatch.setattr(Path, "rename", fails_at(number))
        with pytest.raises(KeyboardInterrupt):
            ortolan.export(checkpoint, target, max_context=32, overwrite=True)
        assert sorted(target.iterdir()) == names
        np.testing.assert_array_equal(logits(target), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_exists_stays_the_same(checkpoint, tmp_path, monkeypatch, overwrite):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    before = os.stat(".").st_ino
    ortolan.export(checkpoint, ".", max_context=64)
    if overwrite:
        ortolan.export(checkpoint, ".", max_context=32, overwrite=True)
    assert os.stat(tmp_path / "model").st_ino == before
    assert sorted(os.listdir()) == sorted([*read_manifest(Path()).files, "ortolan.json"])
    assert read_manifest(Path()).max_context == (32 if overwrite else 64)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_who_comes_last_replaces_all_of_what_others_put_there(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    finished = [tmp_path / f".model.{number}" for number in range(24)]
    for folder in finished:
        folder.mkdir()
        for name in "abcdefgh":
            (folder / name).write_text(folder.name)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda folder: put_in_place(folder, target), finished))
    assert sorted(path.name for path in target.iterdir()) == list("abcdefgh")
    assert len({path.read_text() for path in target.iterdir()}) == 1


def test_what_another_process_left_unfinished_is_in_nobodys_way(checkpoint, tmp_path):
    left = tmp_path / "model" / ".model.0123abcd"
    left.mkdir(parents=True)
    for overwrite in (False, True):
        ortolan.export(checkpoint, tmp_path / "model", max_context=64, overwrite=overwrite)
        assert left.is_dir()


@pytest.mark.parametrize("place", ["file/model", "file/deep/model", "/proc/none/model"])
def test_places_for_no_folder_are_refused(checkpoint, tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="no folder can be made"):
        ortolan.export(checkpoint, tmp_path / place, max_context=64)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_link_goes_on_pointing_at_the_model(checkpoint, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "model")
    for max_context in (64, 32):
        ortolan.export(checkpoint, link, max_context=max_context, overwrite=True)
        assert link.is_symlink()
        assert read_manifest(tmp_path / "model").max_context == max_context
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "model"]


def test_existing_folders_are_safe(checkpoint, tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"not empty|something else"):
            ortolan.export(checkpoint, target, max_context=64, overwrite=overwrite)
    assert (target / "notes.txt").read_text() == "mine"
    (target / "notes.txt").unlink()
    ortolan.export(checkpoint, target, max_context=64)
    before = logits(target)
    ortolan.export(checkpoint, target, max_context=64, overwrite=True)
    np.testing.assert_array_equal(logits(target), before)
