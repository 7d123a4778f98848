"""The fused graphs in a model folder: their files, their places in the manifest, and folders without them."""

import json

import pytest
from families import tiny_checkpoint

import ortolan
from ortolan.errors import ConfigError, ContractMismatchError
from ortolan.manifest import CPU_FILE, FUSED_FILE, MANIFEST_FILE, MODEL_FILE, read_manifest


@pytest.fixture
def checkpoint(tmp_path):
    return tiny_checkpoint("llama_biased", tmp_path / "hf")


def test_the_manifest_names_the_fused_graph(checkpoint, tmp_path):
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    manifest = read_manifest(folder)
    assert (manifest.fused_model, manifest.cpu_model) == (FUSED_FILE, CPU_FILE)
    for name in (FUSED_FILE, CPU_FILE):
        assert manifest.files[name] == (folder / name).stat().st_size
    assert [path.name for path in folder.glob("*.data")] == ["model.onnx.data"], "all graphs read one weights file"


def test_a_model_of_bfloat16_has_no_graph_for_the_cpu(checkpoint, tmp_path):
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64, dtype="bfloat16")
    manifest = read_manifest(folder)
    assert (manifest.fused_model, manifest.cpu_model) == (FUSED_FILE, None)
    assert not (folder / CPU_FILE).exists()


@pytest.mark.parametrize("name", [FUSED_FILE, CPU_FILE])
def test_a_damaged_fused_graph_is_noticed(checkpoint, tmp_path, name):
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    (folder / name).unlink()
    with pytest.raises(ContractMismatchError, match=name):
        ortolan.load(folder, device="cpu")


def test_fusing_can_be_left_out(checkpoint, tmp_path):
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64, fuse=False)
    assert (read_manifest(folder).fused_model, read_manifest(folder).cpu_model) == (None, None)
    assert not any((folder / name).exists() for name in (FUSED_FILE, CPU_FILE))
    with pytest.raises(ConfigError, match="no fused graph"):
        ortolan.load(folder, device="cpu", fused=True)


def test_what_may_be_left_out_of_the_manifest(checkpoint, tmp_path):
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64, fuse=False)
    path = folder / MANIFEST_FILE
    keys = json.loads(path.read_text())
    for key in ("fused_model", "cpu_model", "weight_format", "cache_dtype"):
        del keys[key]
    path.write_text(json.dumps(keys))
    manifest = read_manifest(folder)
    assert (manifest.fused_model, manifest.weight_format, manifest.cache_dtype) == (None, "dense", "float32")
    assert ortolan.load(folder, device="cpu").session().prefill([3, 4, 5]).shape == (131,)


@pytest.mark.parametrize(("fused", "opened"), [(None, CPU_FILE), (True, CPU_FILE), (False, MODEL_FILE)])
def test_the_cpu_opens_the_graph_that_is_for_it(checkpoint, tmp_path, fused, opened, caplog):
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    with caplog.at_level("INFO", logger="ortolan"):
        model = ortolan.load(folder, device="cpu", fused=fused)
    assert any(f"opened {folder / opened} " in record.getMessage() for record in caplog.records)
    assert model.session().prefill([3]).shape == (131,)


@pytest.mark.parametrize("fuse", [True, False])
def test_weights_are_the_same_with_and_without(checkpoint, tmp_path, fuse):
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64, fuse=fuse)
    other = ortolan.export(checkpoint, tmp_path / "other", max_context=64, fuse=not fuse)
    assert (folder / "model.onnx.data").read_bytes() == (other / "model.onnx.data").read_bytes()
