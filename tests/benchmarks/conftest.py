"""The shipped model, exported once."""

import pytest
from families import shared_model

import ortolan
from ortolan.retrieval import shipped_model


@pytest.fixture(scope="session")
def retriever_folder():
    """Return the folder of the shipped model, exported."""
    return shared_model(shipped_model(), max_context=4096, chunk_size=512)


@pytest.fixture(scope="session")
def retriever(retriever_folder):
    """Return the shipped model on one core."""
    return ortolan.load(retriever_folder, device="cpu", num_threads=1)
