"""A model folder is as open to others as the umask says, and so is what is in it."""

import os
import stat

import pytest
from families import shared_checkpoint

import ortolan


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_folder_follows_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        folder = ortolan.export(shared_checkpoint("llama"), tmp_path / "model", max_context=64)
        ortolan.export(shared_checkpoint("llama"), folder, max_context=64, overwrite=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~umask
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o666 & ~umask}
