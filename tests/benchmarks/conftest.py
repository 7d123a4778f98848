"""The shipped model, exported once."""

import pytest

import ortolan
from ortolan.cli.demo import shipped_model


@pytest.fixture(scope="session")
def retriever_folder(tmp_path_factory):
    """Return the folder of the shipped model, exported."""
    folder = tmp_path_factory.mktemp("retriever") / "model"
    return ortolan.export(shipped_model(), folder, max_context=4096, chunk_size=512)


@pytest.fixture(scope="session")
def retriever(retriever_folder):
    """Return the shipped model on one core."""
    return ortolan.load(retriever_folder, device="cpu", num_threads=1)
