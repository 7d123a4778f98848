"""Sessions on CUDA are opened without warnings of ONNX Runtime's that are not its user's business."""

from __future__ import annotations

import subprocess
import sys

import pytest

# ONNX Runtime without CUDA looks for a plug-in first, too, and warns alike; a session of it takes CUDA's options here.
CODE = """
import onnx
from onnx import TensorProto, helper
import onnxruntime
from onnxruntime.capi import _pybind_state
from ortolan.runtime.device.providers import CUDA_PROVIDER, ERRORS, cuda_options, quiet_opening

value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", value[:1], value[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
options = onnxruntime.SessionOptions()
options.log_severity_level = ERRORS

def start(settings):
    session = _pybind_state.InferenceSession(options, model, False, True)
    session.initialize_session([CUDA_PROVIDER], [settings], set())

def opened(number):
    with quiet_opening(number):
        start(cuda_options(number, 0, graph=False))
"""
WARNING = "No registered plugin EP device found"


def errors_of(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", CODE + code], capture_output=True, text=True, timeout=60, check=True)
    return result.stderr


@pytest.mark.parametrize("number", [0, 1])
def test_no_device_is_warned_of(number):
    if WARNING not in errors_of("start({'device_id': '0'})"):
        pytest.skip("this version of ONNX Runtime does not warn of plug-ins")
    assert errors_of(f"opened({number})") == ""


def test_warnings_come_back_afterwards():
    code = "onnxruntime.set_default_logger_severity(2); opened(1); start({'device_id': '0'})"
    if WARNING not in errors_of("start({'device_id': '0'})"):
        pytest.skip("this version of ONNX Runtime does not warn of plug-ins")
    assert errors_of(code).count(WARNING) == 1
