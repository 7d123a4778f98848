"""The fused graph in a model folder: its file, its place in the manifest, and folders without it."""

import json

import pytest
from families import tiny_checkpoint

import ortolan
from ortolan.errors import ConfigError, ContractMismatchError
from ortolan.manifest import FUSED_FILE, MANIFEST_FILE, read_manifest


@pytest.fixture
def checkpoint(tmp_path):
    return tiny_checkpoint("llama_biased", tmp_path / "hf")


def test_the_manifest_names_the_fused_graph(checkpoint, tmp_path):
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    manifest = read_manifest(folder)
    assert manifest.fused_model == FUSED_FILE
    assert manifest.files[FUSED_FILE] == (folder / FUSED_FILE).stat().st_size
    assert [path.name for path in folder.glob("*.data")] == ["model.onnx.data"], "both graphs read one weights file"


def test_a_damaged_fused_graph_is_noticed(checkpoint, tmp_path):
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    (folder / FUSED_FILE).unlink()
    with pytest.raises(ContractMismatchError, match=r"model\.fused\.onnx"):
        ortolan.load(folder, device="cpu")


def test_fusing_can_be_left_out(checkpoint, tmp_path):
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64, fuse=False)
    assert read_manifest(folder).fused_model is None
    assert not (folder / FUSED_FILE).exists()
    with pytest.raises(ConfigError, match="no fused graph"):
        ortolan.load(folder, device="cpu", fused=True)


def test_what_may_be_left_out_of_the_manifest(checkpoint, tmp_path):
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64, fuse=False)
    path = folder / MANIFEST_FILE
    keys = json.loads(path.read_text())
    for key in ("fused_model", "weight_format", "cache_dtype"):
        del keys[key]
    path.write_text(json.dumps(keys))
    manifest = read_manifest(folder)
    assert (manifest.fused_model, manifest.weight_format, manifest.cache_dtype) == (None, "dense", "float32")
    assert ortolan.load(folder, device="cpu").session().prefill([3, 4, 5]).shape == (131,)


def test_the_fused_graph_is_for_cuda(checkpoint, tmp_path):
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    with pytest.raises(ConfigError, match="CUDA only"):
        ortolan.load(folder, device="cpu", fused=True)
    assert ortolan.load(folder, device="cpu", fused=False).session().prefill([3]).shape == (131,)


@pytest.mark.parametrize("fuse", [True, False])
def test_weights_are_the_same_with_and_without(checkpoint, tmp_path, fuse):
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64, fuse=fuse)
    other = ortolan.export(checkpoint, tmp_path / "other", max_context=64, fuse=not fuse)
    assert (folder / "model.onnx.data").read_bytes() == (other / "model.onnx.data").read_bytes()
