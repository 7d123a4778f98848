"""Opening model folders: refusals say what is wrong before a session is made."""

import json
import re
import shutil

import numpy as np
import onnx
import pytest
from fake_cuda import FakeCuda
from unreadable import make_unreadable

import ortolan
from ortolan import SnapKv
from ortolan.errors import ConfigError, ContractMismatchError, OpLibraryError
from ortolan.manifest import (
    CPU_FILE,
    EVICT_FILE,
    FUSED_FILE,
    MANIFEST_FILE,
    MANIFEST_METADATA,
    MODEL_FILE,
    read_manifest,
)
from ortolan.policies import STRUCTURE_METADATA
from ortolan.runtime.device import providers
from ortolan.runtime.device.opening import Device
from ortolan.runtime.eviction.graphs import GraphBuilders
from ortolan.runtime.model import Model


@pytest.fixture
def folder(full_folder, tmp_path):
    return shutil.copytree(full_folder, tmp_path / "model")


def change_manifest(folder, **changes) -> None:
    path = folder / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("count", [-1, 1.5, "2", True, 2**31])
def test_threads_that_are_no_number_are_refused(full_folder, count):
    with pytest.raises(ConfigError, match="num_threads"):
        ortolan.load(full_folder, device="cpu", num_threads=count)


@pytest.mark.parametrize("fused", ["no", 0, 1, "", []])
def test_a_choice_of_the_graph_that_is_no_truth_is_refused(full_folder, fused):
    with pytest.raises(ConfigError, match=r"fused is .*True or False"):
        ortolan.load(full_folder, device="cpu", fused=fused)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "CPU", "cuda:-1", "", 0, np.zeros(2)])
def test_unknown_devices_are_refused(full_folder, name):
    with pytest.raises(ConfigError, match="cuda:N"):
        ortolan.load(full_folder, device=name)


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_cuda_that_is_not_there_is_explained(full_folder, monkeypatch, name):
    monkeypatch.setattr(providers, "cuda_problem", lambda: "no kernels")
    with pytest.raises(OpLibraryError, match=f"{name}.*no kernels"):
        ortolan.load(full_folder, device=name)


def test_no_device_takes_the_cpu_where_cuda_is_not_usable(full_folder, monkeypatch):
    monkeypatch.setattr(providers, "cuda_problem", lambda: "no kernels")
    assert providers.resolve_device(None) == providers.CPU_PROVIDER
    monkeypatch.setattr(providers, "cuda_problem", lambda: None)
    assert providers.resolve_device(None) == providers.CUDA_PROVIDER


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(ContractMismatchError, match="ortolan export"):
        ortolan.load(tmp_path)


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "ortolan.json"])
def test_a_file_that_may_not_be_read_is_named(folder, monkeypatch, name):
    make_unreadable(folder / name, monkeypatch)
    with pytest.raises(ContractMismatchError, match=r"cannot be read: .*Permission denied") as caught:
        ortolan.load(folder, device="cpu")
    assert str(caught.value).startswith(f"{folder / name} ")


def test_a_folder_that_may_not_be_read_is_not_said_to_lack_files(folder, monkeypatch):
    make_unreadable(folder, monkeypatch)
    with pytest.raises(ContractMismatchError, match=f"^{re.escape(str(folder))} cannot be read: Permission denied$"):
        ortolan.load(folder, device="cpu")


def test_a_manifest_of_another_graph_is_refused(folder):
    """Nothing in the graph's inputs tells of sinks, and with a wrong number its logits would be wrong."""
    change_manifest(folder, sink=1)
    with pytest.raises(ContractMismatchError, match="another sink"):
        ortolan.load(folder, device="cpu")


@pytest.mark.parametrize("change", [{"window": 7}, {"scale": 0.5}, {"softcap": 3.0}])
def test_a_manifest_of_other_layers_is_refused(folder, change):
    layers = json.loads((folder / MANIFEST_FILE).read_text())["layers"]
    change_manifest(folder, layers=[{**layers[0], **change}, *layers[1:]])
    with pytest.raises(ContractMismatchError, match="another layers"):
        ortolan.load(folder, device="cpu")


def test_a_manifest_of_other_heads_is_refused(folder):
    layers = json.loads((folder / MANIFEST_FILE).read_text())["layers"]
    change_manifest(folder, layers=[{**layers[0], "num_heads": 8}, *layers[1:]])
    with pytest.raises(ContractMismatchError, match=r"layer\.0\.capture.*says 8 heads of 16"):
        ortolan.load(folder, device="cpu")


def test_another_operator_version_is_refused(folder):
    change_manifest(folder, operator_version=99)
    with pytest.raises(ContractMismatchError, match="version 99"):
        ortolan.load(folder)


def test_a_graph_of_other_sizes_is_refused(folder):
    layers = json.loads((folder / MANIFEST_FILE).read_text())["layers"]
    change_manifest(folder, layers=[layer | {"num_kv_heads": 4} for layer in layers])
    with pytest.raises(ContractMismatchError, match=r"layer\.0\.key_cache.*says \[4, "):
        ortolan.load(folder, device="cpu")


def test_a_graph_of_another_vocabulary_is_refused(folder):
    change_manifest(folder, vocab_size=132)
    with pytest.raises(ContractMismatchError, match="vocabulary of 132"):
        ortolan.load(folder, device="cpu")


def test_a_graph_with_other_inputs_is_refused(folder):
    layers = json.loads((folder / MANIFEST_FILE).read_text())["layers"]
    change_manifest(folder, layers=[layer | {"evictable": False} for layer in layers])
    with pytest.raises(ContractMismatchError, match=r"unknown.*layer\.0\.capture"):
        ortolan.load(folder, device="cpu")


@pytest.mark.parametrize(("fused", "opened"), [(None, FUSED_FILE), (False, MODEL_FILE)])
@pytest.mark.parametrize("change", [{"evictable": False}, {"num_kv_heads": 4}])
def test_a_refusal_names_the_graph_that_was_opened(full_model, folder, monkeypatch, fused, opened, change):
    layers = json.loads((folder / MANIFEST_FILE).read_text())["layers"]
    change_manifest(folder, layers=[layer | change for layer in layers])
    paths = []

    def open_graph(self, path, folder, **options):
        paths.append(path)
        return full_model.decoder.session  # what differs between the files needs CUDA; their inputs are the same

    monkeypatch.setattr(Device, "open", open_graph)
    device = Device(provider=providers.CUDA_PROVIDER, cuda=FakeCuda())
    with pytest.raises(ContractMismatchError, match=rf"^{re.escape(opened)}\b"):
        Model(folder, read_manifest(folder), device, GraphBuilders(), fused)
    assert [path for path in paths if not path.endswith(EVICT_FILE)] == [str(folder / opened)]


def test_a_graph_that_is_no_graph_is_refused(folder):
    content = (folder / CPU_FILE).read_bytes()
    (folder / CPU_FILE).write_bytes(b"x" * len(content))
    with pytest.raises(ContractMismatchError, match="cannot open"):
        ortolan.load(folder, device="cpu")


def test_snapkv_on_a_model_that_cannot_evict_is_refused(tmp_path):
    from families import tiny_checkpoint

    checkpoint = tiny_checkpoint("llama", tmp_path / "hf")
    exported = ortolan.export(checkpoint, tmp_path / "model", max_context=64, snapkv_window=0)
    with pytest.raises(ConfigError, match="snapkv_window=0"):
        ortolan.load(exported, device="cpu").session(snapkv=SnapKv())


def test_a_context_beyond_the_export_is_refused(full_model):
    with pytest.raises(ConfigError, match="513"):
        full_model.session(max_context=513)


def test_bfloat16_on_the_cpu_is_explained(folder):
    change_manifest(folder, dtype="bfloat16", cache_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"bfloat16 model.*float16"):
        ortolan.load(folder, device="cpu")


def test_names_that_are_not_texts_are_refused(folder):
    graph = onnx.load(folder / CPU_FILE, load_external_data=False)
    graph.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "@" * 20
    (folder / CPU_FILE).write_bytes(graph.SerializeToString().replace(b"@" * 20, b"\xff" * 20))
    change_manifest(folder, files={CPU_FILE: (folder / CPU_FILE).stat().st_size})
    with pytest.raises(ContractMismatchError, match=re.escape(CPU_FILE)):
        ortolan.load(folder, device="cpu")


@pytest.mark.parametrize("content", [b"\xff" * 20, b"{this is not JSON}", b"[" * 100_000])
@pytest.mark.parametrize("name", [CPU_FILE, EVICT_FILE])
def test_metadata_that_are_not_texts_or_not_json_are_refused(folder, name, content):
    graph = onnx.load(folder / name, load_external_data=False)
    kept = (MANIFEST_METADATA, STRUCTURE_METADATA)
    next(entry for entry in graph.metadata_props if entry.key in kept).value = "@" * len(content)
    (folder / name).write_bytes(graph.SerializeToString().replace(b"@" * len(content), content))
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST_FILE}
    change_manifest(folder, files=sizes)
    with pytest.raises(ContractMismatchError, match=re.escape(name)):
        ortolan.load(folder, device="cpu").session(snapkv=SnapKv(budget=40, window=8))
