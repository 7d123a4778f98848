"""Per-layer embeddings that stay in host memory: the same bits, read from where they are said to lie."""

import ctypes
import dataclasses
import json
import shutil

import numpy as np
import pytest
from fake_cuda import FakeCuda
from families import shared_checkpoint, shared_model

import ortolan
from ortolan import Engine, contract
from ortolan.cli import main
from ortolan.element_types import element_type
from ortolan.errors import ConfigError, NumericError
from ortolan.manifest import CPU_FILE, MODEL_FILE
from ortolan.runtime.device import cuda
from ortolan.runtime.device.host_tables import DL_CUDA, find_layer_table, share


@pytest.fixture(scope="module")
def checkpoint():
    return shared_checkpoint("gemma4", seed=5)


@pytest.fixture(scope="module", params=["float32", "float16"])
def folder(request, checkpoint):
    return shared_model(checkpoint, max_context=256, chunk_size=32, dtype=request.param)


def test_tokens_and_logits_are_the_same_bits(folder, draw_tokens):
    plain = ortolan.load(folder, device="cpu", num_threads=1).session()
    hosted = ortolan.load(folder, device="cpu", num_threads=1, host_embeddings=True).session()
    prompt = draw_tokens(70)
    np.testing.assert_array_equal(hosted.prefill(prompt), plain.prefill(prompt))
    assert list(hosted.generate([5], 20)) == list(plain.generate([5], 20))
    table = find_layer_table(folder / MODEL_FILE)
    assert hosted.memory_report().host_embedding_bytes == table.bytes == np.prod(table.shape) * table.element.bytes
    assert plain.memory_report().host_embedding_bytes == 0


def test_an_engine_reads_them_there(checkpoint, draw_tokens):
    paged = shared_model(checkpoint, max_context=256, chunk_size=32, paged=True, page_size=16)
    prompts = [draw_tokens(count, seed=count) for count in (20, 50)]
    results = []
    for hosted in (False, True):
        with Engine(ortolan.load(paged, device="cpu", num_threads=1, host_embeddings=hosted), 2) as engine:
            results.append([stream.result() for stream in [engine.submit(prompt, 20) for prompt in prompts]])
    assert results[0] == results[1]


def test_the_graph_reads_the_given_rows_and_not_the_files(folder, tmp_path, draw_tokens):
    """The rows in the file are NaN, and those that are given are right."""
    model = ortolan.load(folder, device="cpu", num_threads=1)
    expected = model.session().prefill(draw_tokens(20))
    spoiled = shutil.copytree(folder, tmp_path / "spoiled")
    table = find_layer_table(spoiled / CPU_FILE)
    with open(spoiled / table.file, "r+b") as file:
        file.seek(table.offset)
        file.write(b"\xff" * table.bytes)
    with pytest.raises(NumericError):
        ortolan.load(spoiled, device="cpu").session().prefill(draw_tokens(20))
    value = model.device.buffers.host_table(table.map(folder), table.element)
    session = model.device.open(str(spoiled / CPU_FILE), spoiled, weights={contract.LAYER_TABLE: value})
    model.decoder = dataclasses.replace(model.decoder, session=session)
    np.testing.assert_array_equal(model.session().prefill(draw_tokens(20)), expected)


@pytest.mark.parametrize(("dtype", "code"), [("float32", 2), ("float16", 2), ("bfloat16", 4)])
def test_rows_are_shared_as_the_devices_own(dtype, code, monkeypatch):
    """What ONNX Runtime is given on CUDA: an address of pinned memory, which it takes for device memory."""
    element, shared = element_type(dtype), []
    monkeypatch.setattr(cuda, "as_initializer", lambda *arguments: shared.append(arguments))
    rows = np.arange(12).reshape(3, 4).astype(element.storage)
    device = FakeCuda()
    device.host_table(rows, element)
    ((pinned, given, place),) = shared
    assert (given, place) == (element, (DL_CUDA, device.device_id))
    assert pinned.ctypes.data != rows.ctypes.data
    np.testing.assert_array_equal(pinned, rows)
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsule = share(pinned, element, (DL_CUDA, 3))
    words = np.ctypeslib.as_array((ctypes.c_int32 * 5).from_address(get_pointer(capsule, b"dltensor") + 8))
    assert words[:3].tolist() == [DL_CUDA, 3, 2]
    assert words[3:4].view(np.uint8)[:2].tolist() == [code, 8 * element.bytes]


def test_models_without_them_are_refused():
    folder = shared_model(shared_checkpoint("llama"), max_context=64)
    with pytest.raises(ConfigError, match="no per-layer embeddings; leave it out"):
        ortolan.load(folder, device="cpu", host_embeddings=True)
    with pytest.raises(ConfigError, match="host_embeddings"):
        ortolan.load(folder, device="cpu", host_embeddings="yes")


def test_the_command_line_says_and_chooses_where_they_lie(folder, capsys):
    size = find_layer_table(folder / MODEL_FILE).bytes
    assert main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layer_embedding_bytes"] == size
    assert main(["inspect", str(folder)]) == 0
    assert "per-layer embeddings: " in capsys.readouterr().out
    options = ["--prompts", "20", "--decode", "2", "--repeats", "1", "--device", "cpu", "--json", "-"]
    assert main(["bench", str(folder), *options, "--host-embeddings"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [run["memory"]["host_embedding_bytes"] for run in report["prompts"]] == [size]
