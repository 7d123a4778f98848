"""Arrays that stay on the device under test while operators read and change them in place."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import devices
import numpy as np
import onnxruntime as ort
from harness import find_operator, open_session


class Resident:
    """An array in host memory, or in a GPU's."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, storage: Any) -> None:
        self.shape, self.dtype, self.storage = shape, np.dtype(dtype), storage

    @classmethod
    def of(cls, array: np.ndarray) -> Resident:
        """Copy an array to the device."""
        if devices.current() == "cpu":
            return cls(array.shape, array.dtype, np.array(array, order="C"))
        return cls(array.shape, array.dtype, devices.upload(array))

    @classmethod
    def reserve(cls, shape: tuple[int, ...], dtype: np.dtype) -> Resident:
        """Make an array of zeros; on the host its memory is only taken where it is touched."""
        if devices.current() == "cpu":
            return cls(shape, dtype, np.zeros(shape, dtype))
        import cupy

        return cls(shape, dtype, cupy.zeros(shape, devices.storage_type(np.dtype(dtype))))

    def bind_input(self, binding: Any, name: str) -> None:
        """Bind as an input."""
        if devices.current() == "cpu":
            binding.bind_ortvalue_input(name, self._value)
        else:
            binding.bind_input(name, "cuda", 0, devices.ONNX_TYPES[self.dtype], self.shape, self.storage.data.ptr)

    def bind_output(self, binding: Any, name: str) -> None:
        """Bind as an output."""
        if devices.current() == "cpu":
            binding.bind_ortvalue_output(name, self._value)
        else:
            binding.bind_output(name, "cuda", 0, devices.ONNX_TYPES[self.dtype], self.shape, self.storage.data.ptr)

    def numpy(self) -> np.ndarray:
        """Copy to the host."""
        if devices.current() == "cpu":
            return self.storage.copy()
        import cupy

        flat = cupy.asnumpy(self.storage).reshape(-1)[: np.prod(self.shape, dtype=np.int64)]
        return flat.view(self.dtype).reshape(self.shape)

    def pages(self, indices: list[int]) -> np.ndarray:
        """Copy some entries of the first axis to the host."""
        if devices.current() == "cpu":
            return self.storage[indices]
        import cupy

        return cupy.asnumpy(self.storage.reshape(self.shape)[indices]).view(self.dtype)

    @functools.cached_property
    def _value(self) -> Any:
        return ort.OrtValue.ortvalue_from_numpy(self.storage)


@functools.cache
def _session(
    device: str, name: str, layout: tuple[tuple[str, np.dtype, int], ...], attributes: tuple, omitted: tuple[str, ...]
) -> ort.InferenceSession:
    assert device == devices.current()
    feeds = {port: np.empty((1,) * rank, kind) for port, kind, rank in layout}
    return open_session(name, feeds, dict(attributes), omitted)


def run_resident(
    name: str, inputs: Mapping[str, Resident], outputs: Mapping[str, Resident], **attributes: object
) -> None:
    """Run one operator; outputs that alias an input are bound to its buffer, optional ones not given are left out.

    Args:
        name: of the operator.
        inputs: by port.
        outputs: by port, those without an alias.
        **attributes: of the node.
    """
    operator = find_operator(name)
    bound = dict(outputs)
    for port in operator.outputs:
        if port.alias >= 0:
            bound[port.name] = inputs[operator.inputs[port.alias].name]
    omitted = tuple(port.name for port in operator.outputs if port.name not in bound)
    layout = tuple((port, array.dtype, len(array.shape)) for port, array in inputs.items())
    session = _session(devices.current(), name, layout, tuple(sorted(attributes.items())), omitted)
    binding = session.io_binding()
    for port, array in inputs.items():
        array.bind_input(binding, port)
    for port, array in bound.items():
        array.bind_output(binding, port)
    devices.synchronize()  # the session has a stream of its own
    session.run_with_iobinding(binding)
    devices.synchronize()
