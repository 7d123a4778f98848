"""Any ONNX Runtime program can register the operators: once or often, from several threads, with clear refusals."""

import ctypes
import gc
import importlib.util
import itertools
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from harness import open_session

import ortolan.custom_ops
from ortolan.custom_ops import library, reference
from ortolan.errors import OpLibraryError

QUERY_START = np.array([0, 3], np.int32)
PAST_LEN = np.array([2], np.int32)
QUERY = np.arange(3 * 2 * 8, dtype=np.float32).reshape(3, 2, 8)
CAPTURE = np.full((1, 4, 2, 8), np.nan, np.float32)


def foreign_model() -> bytes:
    """Build what another exporter would: standard nodes around a SnapKvCapture, without Ortolan's emitters."""
    text = """
    <ir_version: 10, opset_import: ["" : 23, "ortolan" : 1]>
    capture (float[T, 2, 8] x, float[1, 4, 2, 8] kept, int32[2] rows, int32[1] past) => (float[1, 4, 2, 8] doubled) {
        query = Add(x, x)
        captured = ortolan.SnapKvCapture(query, kept, rows, past)
        doubled = Add(captured, captured)
    }
    """
    return onnx.parser.parse_model(text).SerializeToString()


def run_foreign_model(session: ort.InferenceSession, query: np.ndarray) -> np.ndarray:
    return session.run(None, {"x": query, "kept": CAPTURE, "rows": QUERY_START, "past": PAST_LEN})[0]


def expected_of_foreign_model(query: np.ndarray) -> np.ndarray:
    return 2 * reference.snapkv_capture(query + query, CAPTURE, QUERY_START, PAST_LEN)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_foreign_model_runs_however_often_it_was_registered(times):
    options = ort.SessionOptions()
    for _ in range(times):
        ortolan.custom_ops.register(options)
    session = ort.InferenceSession(foreign_model(), options, providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(run_foreign_model(session, QUERY), expected_of_foreign_model(QUERY))


def test_registration_by_hand_and_by_function_agree():
    def by_hand(options: ort.SessionOptions) -> None:
        options.register_custom_ops_library(str(ortolan.custom_ops.library_path()))

    for ways in itertools.product((by_hand, ortolan.custom_ops.register), repeat=2):
        options = ort.SessionOptions()
        for register in ways:
            register(options)
        session = ort.InferenceSession(foreign_model(), options, providers=["CPUExecutionProvider"])
        np.testing.assert_array_equal(run_foreign_model(session, QUERY), expected_of_foreign_model(QUERY))


def test_a_foreign_model_is_unknown_without_registration():
    with pytest.raises(Exception, match="ortolan"):
        ort.InferenceSession(foreign_model(), providers=["CPUExecutionProvider"])


def test_sessions_outlive_their_options_and_each_other():
    def open_foreign() -> ort.InferenceSession:
        options = ort.SessionOptions()
        ortolan.custom_ops.register(options)
        return ort.InferenceSession(foreign_model(), options, providers=["CPUExecutionProvider"])

    for _ in range(3):
        sessions = [open_foreign() for _ in range(3)]
        gc.collect()
        del sessions[:2]
        gc.collect()
        np.testing.assert_array_equal(run_foreign_model(sessions[0], QUERY), expected_of_foreign_model(QUERY))


def test_one_session_runs_from_several_threads():
    rng = np.random.default_rng(0)
    feeds = [
        {
            "query": rng.standard_normal((count, 4, 16)).astype(np.float32),
            "key_cache": rng.standard_normal((1, 2, 64, 16)).astype(np.float32),
            "value_cache": rng.standard_normal((1, 2, 64, 16)).astype(np.float32),
            "query_start": np.array([0, count], np.int32),
            "past_len": np.array([64 - count], np.int32),
        }
        for count in (1, 2, 17, 40) * 4
    ]
    session = open_session("SwaAttention", feeds[0], {})
    alone = [session.run(None, feed) for feed in feeds]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda feed: session.run(None, feed), feeds * 4))
    for index, results in enumerate(together):
        for got, want in zip(results, alone[index % len(feeds)], strict=True):
            np.testing.assert_array_equal(got, want)


def test_an_old_runtime_is_refused():
    """The library is given a runtime that only knows API version 1, whose one function makes statuses."""
    messages = []

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    def create_status(_code, message):
        messages.append(message.decode())
        return 0xBAD

    table = (ctypes.c_void_p * 1)(ctypes.cast(create_status, ctypes.c_void_p).value)

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    def get_api(version):
        return ctypes.addressof(table) if version == 1 else None

    text = ctypes.create_string_buffer(b"1.9.0")

    @ctypes.CFUNCTYPE(ctypes.c_void_p)
    def get_version():
        return ctypes.addressof(text)

    base = (ctypes.c_void_p * 2)(*(ctypes.cast(f, ctypes.c_void_p).value for f in (get_api, get_version)))
    function = ctypes.CDLL(str(ortolan.custom_ops.library_path())).RegisterCustomOps
    function.restype = ctypes.c_void_p
    assert function(None, base) == 0xBAD
    assert len(messages) == 1
    assert "ONNX Runtime 1.9.0" in messages[0]
    assert "1.20 or newer" in messages[0]


def test_a_broken_library_is_named(monkeypatch, tmp_path):
    broken = tmp_path / "lib" / library.LIBRARY_FILE
    broken.parent.mkdir()
    broken.write_bytes(b"not a library")
    monkeypatch.setattr("ortolan.custom_ops.__path__", [str(tmp_path)])
    with pytest.raises(OpLibraryError, match="cannot be loaded"):
        ortolan.custom_ops.library_info()
    options = ort.SessionOptions()
    for _ in range(2):  # a refused registration must not count as one
        with pytest.raises(OpLibraryError, match=f"refused {broken}"):
            ortolan.custom_ops.register(options)


def test_wheels_that_overwrite_each_other_are_named(monkeypatch):
    versions = {"onnxruntime": "1.31.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    assert library.onnxruntime_problem() is None
    versions["onnxruntime-gpu"] = "1.31.1"
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in library.onnxruntime_problem()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "onnxruntime is not installed" in library.onnxruntime_problem()
