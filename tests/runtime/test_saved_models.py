"""Saved sessions of models with other cache types and other RoPE."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from families import FAMILIES, tiny_checkpoint
from saved_sessions import DEVICES, assert_same, place, with_manifest

import ortolan
from ortolan import SnapKv

SNAPKV = SnapKv(budget=40, window=8, sink=2)
ROLES = ("key", "value")
EVERYTHING = 10**6  # rewind_tokens past any ring


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chat.session"


def test_float16(tmp_path, path, draw_tokens):
    checkpoint = tiny_checkpoint("gemma3", tmp_path / "hf", seed=5, num_key_value_heads=2)
    folder = ortolan.export(checkpoint, tmp_path / "model", dtype="float16", max_context=512, chunk_size=16)
    model = ortolan.load(folder, device="cpu", num_threads=1)
    session = model.session(snapkv=SNAPKV)
    session.prefill(draw_tokens(130))
    session.save(path)
    restored = model.restore(path)
    for tokens in (draw_tokens(3, seed=1), draw_tokens(60, seed=2)):
        np.testing.assert_array_equal(restored.prefill(tokens), session.prefill(tokens))
    assert_same(session, restored)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_caches_of_two_bytes_are_copied_bit_for_bit(mixed_model, monkeypatch, device, path, dtype):
    """No CPU kernel computes in bfloat16, so the caches are filled by hand; NaN keeps its bits."""
    model = place(with_manifest(mixed_model, dtype=dtype, cache_dtype=dtype), device, monkeypatch)
    session, rng = model.session(), np.random.default_rng(0)
    caches = session.feeder.caches.store.tensors
    for index, role in itertools.product(caches, ROLES):
        array = caches[index][role]
        assert array.itemsize == np.dtype(ml_dtypes.bfloat16).itemsize
        array.view(np.uint16)[:] = rng.integers(0, 2**16, array.shape)
    session.state.read([3] * 200)
    session.save(path, EVERYTHING)
    restored = model.restore(path).feeder.caches.store.tensors
    for index, role in itertools.product(caches, ROLES):
        slots = slice(0, min(200, session.cache_capacity(index)))
        rows = [each[index][role][0, :, slots].view(np.uint16) for each in (caches, restored)]
        np.testing.assert_array_equal(*rows)


def test_a_sequence_that_its_frequencies_outgrow(tmp_path, path, draw_tokens):
    limit = {"original_max_position_embeddings": 64}
    rope = FAMILIES["phi3"]["rope_parameters"] | limit
    checkpoint = tiny_checkpoint("phi3", tmp_path / "hf", sliding_window=None, rope_parameters=rope, **limit)
    model = ortolan.load(
        ortolan.export(checkpoint, tmp_path / "model", max_context=256, chunk_size=16), device="cpu", num_threads=1
    )
    assert len(model.manifest.rope_limits) == 2
    for length, snapkv in ((60, None), (70, None), (70, SNAPKV)):  # what was evicted cannot be read again
        session = model.session(snapkv=snapkv)
        session.prefill(draw_tokens(length))
        session.save(path)
        restored = model.restore(path)
        np.testing.assert_array_equal(restored.prefill(draw_tokens(9)), session.prefill(draw_tokens(9)))
