"""The table of element types agrees with ONNX, NumPy and safetensors."""

import numpy as np
import onnx
import pytest
import safetensors.numpy

from ortolan.element_types import (
    COMPUTE_TYPES,
    ELEMENT_TYPES,
    cache_type,
    element_type,
    from_numpy,
    from_onnx,
    from_safetensors,
)
from ortolan.errors import ConfigError, UnsupportedModelError


@pytest.mark.parametrize("kind", ELEMENT_TYPES.values(), ids=lambda kind: kind.name)
def test_rows_are_what_onnx_and_numpy_say(kind):
    assert np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.onnx)) == kind.numpy
    assert onnx.helper.make_tensor_type_proto(kind.onnx, [1]).tensor_type.elem_type == kind.onnx
    assert kind.storage.itemsize == kind.numpy.itemsize
    assert kind.storage.isbuiltin == 1, "libraries without the type hold its bits"
    assert kind.bits == (4 if kind.name.endswith("int4") else 8 * kind.numpy.itemsize)
    assert from_onnx(kind.onnx) is from_numpy(kind.numpy) is element_type(kind.name) is kind


def test_operators_take_tensors_under_these_names():
    known = {
        text for schema in onnx.defs.get_all_schemas() for c in schema.type_constraints for text in c.allowed_type_strs
    }
    assert {kind.tensor for kind in ELEMENT_TYPES.values()} <= known


@pytest.mark.parametrize("kind", [kind for kind in ELEMENT_TYPES.values() if kind.safetensors and kind.is_plain])
def test_safetensors_writes_these_names(kind):
    header = safetensors.numpy.save({"x": np.zeros(1, kind.numpy)})
    assert f'"dtype":"{kind.safetensors}"'.encode() in header
    assert from_safetensors(kind.safetensors) is kind


def test_activations_are_floats_and_unknown_types_are_named():
    assert all(ELEMENT_TYPES[name].is_float for name in COMPUTE_TYPES)
    assert not element_type("uint8").is_float
    assert from_safetensors("F4") is None
    with pytest.raises(ConfigError, match="'float12' is not known; allowed: float32"):
        element_type("float12")
    with pytest.raises(UnsupportedModelError, match="type 8 "):
        from_onnx(onnx.TensorProto.STRING)


def test_caches_have_the_type_that_their_option_names():
    options = (None, "float16", "fp8", "int8")
    assert [cache_type(option, "float16") for option in options] == ["float16", "float16", "float8_e4m3fn", "int8"]


@pytest.mark.parametrize("option", ["float32", "float8_e4m3fn", "", 8, ["fp8"], {}, np.array(["fp8", "int8"])])
def test_other_types_of_caches_are_refused(option):
    with pytest.raises(ConfigError, match=r"cache_dtype is .*allowed: None, 'float16' \(the dtype\), 'fp8' or 'int8'"):
        cache_type(option, "float16")
