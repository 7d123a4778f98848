"""Tiny exported models that the runtime's tests share, and tokens to feed them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import make_session
from families import shared_checkpoint, shared_model

import ortolan

MAX_CONTEXT = 512
CHUNK_SIZE = 16
VOCABULARY = 131


PAGES = {"paged": True, "page_size": 16}


def _export(family: str, *, paged: bool = False, **overrides: object) -> Path:
    checkpoint = shared_checkpoint(family, seed=5, **overrides)
    pages = PAGES if paged else {}
    return shared_model(checkpoint, max_context=MAX_CONTEXT, chunk_size=CHUNK_SIZE, sink=2, **pages)


@pytest.fixture(scope="session")
def full_folder() -> Path:
    """A model whose layers all attend to everything."""
    return _export("llama")


@pytest.fixture(scope="session")
def full_model(full_folder) -> ortolan.Model:
    return ortolan.load(full_folder, device="cpu", num_threads=1)


@pytest.fixture(scope="session")
def mixed_model() -> ortolan.Model:
    """Layer 1 attends to everything, layers 0, 2 and 3 to a window of 20."""
    return ortolan.load(_export("gemma3", num_key_value_heads=2), device="cpu", num_threads=1)


@pytest.fixture(scope="session")
def paged_model() -> ortolan.Model:
    """A model whose layers all attend to everything, with pages of 16 slots."""
    return ortolan.load(_export("llama", paged=True), device="cpu", num_threads=1)


@pytest.fixture(scope="session")
def paged_mixed_model() -> ortolan.Model:
    """As `mixed_model`, with pages of 16 slots."""
    return ortolan.load(_export("gemma3", paged=True, num_key_value_heads=2), device="cpu", num_threads=1)


@pytest.fixture(scope="session")
def sharing_model() -> ortolan.Model:
    """Layers 4 and 5, of a window of 12, read layer 2's cache, and layer 6 that of layer 3, which sees everything."""
    return ortolan.load(_export("gemma4", num_key_value_heads=2), device="cpu", num_threads=1)


@pytest.fixture(scope="session")
def paged_sharing_model() -> ortolan.Model:
    """As `sharing_model`, with pages of 16 slots."""
    return ortolan.load(_export("gemma4", paged=True, num_key_value_heads=2), device="cpu", num_threads=1)


@pytest.fixture(params=["full", "mixed"])
def model(request) -> ortolan.Model:
    """Run a test with `full_model` and `mixed_model`."""
    return request.getfixturevalue(f"{request.param}_model")


@pytest.fixture(params=["host", "device"])
def open_session(request, monkeypatch):
    """Open sessions on the host, or on a device of NumPy arrays: open_session(model, **options)."""
    if request.param == "host":
        return lambda model, **options: model.session(**options)
    return lambda model, **options: make_session(model, monkeypatch, **options)


@pytest.fixture
def draw_tokens():
    """Draw token ids that are no end-of-sequence token: draw_tokens(count, seed=0)."""

    def draw(count: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()

    return draw


@contextmanager
def without_end_tokens(model: ortolan.Model) -> Iterator[ortolan.Model]:
    """Take a model's end-of-sequence tokens away, which random weights may choose at any time."""
    kept = model.manifest.eos_token_ids
    object.__setattr__(model.manifest, "eos_token_ids", ())
    yield model
    object.__setattr__(model.manifest, "eos_token_ids", kept)


@pytest.fixture
def endless(model):
    """A test's model without end-of-sequence tokens."""
    with without_end_tokens(model) as changed:
        yield changed


@pytest.fixture
def endless_mixed(mixed_model):
    with without_end_tokens(mixed_model) as changed:
        yield changed


@pytest.fixture
def endless_full(full_model):
    with without_end_tokens(full_model) as changed:
        yield changed
