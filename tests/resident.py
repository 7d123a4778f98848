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

    @classmethod
    def poisoned(cls, shape: tuple[int, ...], dtype: np.dtype) -> Resident:
        """Make an array whose bits are all set: NaN in every floating type."""
        count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        bits = devices.array_module().full(count, 0xFF, np.uint8)
        if devices.current() == "cpu":
            return cls(shape, dtype, bits.view(dtype).reshape(shape))
        return cls(shape, dtype, bits.view(devices.storage_type(np.dtype(dtype))))

    def part(self, begin: int, shape: tuple[int, ...]) -> Resident:
        """Return a view of `shape` that starts at element `begin`."""
        flat = self.storage.reshape(-1)[begin : begin + int(np.prod(shape, dtype=np.int64))]
        return Resident(shape, self.dtype, flat.reshape(shape) if devices.current() == "cpu" else flat)

    def flat_bits(self) -> Any:
        """Return all elements as unsigned integers, where they are."""
        return self.storage.reshape(-1).view(f"u{self.dtype.itemsize}")

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


class BoundOperator:
    """One operator that runs many times on the same buffers, but for some inputs and outputs.

    On a GPU its runs follow one another on `devices.stream`, and nothing waits for them.
    """

    def __init__(
        self, name: str, fixed: Mapping[str, Resident], changing: Mapping[str, Resident], outputs: tuple[str, ...],
        **attributes: object,
    ) -> None:  # fmt: skip
        """Bind what stays.

        Args:
            name: of the operator.
            fixed: inputs by port; outputs that alias one are bound to its buffer.
            changing: inputs that `run` is given, by port; here types and ranks count.
            outputs: ports that `run` is given.
            **attributes: of the node.
        """
        operator = find_operator(name)
        sources = {p.name: operator.inputs[p.alias].name for p in operator.outputs if p.alias >= 0}
        aliased = {port: source for port, source in sources.items() if source in fixed}
        omitted = tuple(p.name for p in operator.outputs if p.name not in aliased and p.name not in outputs)
        layout = tuple((port, array.dtype, len(array.shape)) for port, array in {**changing, **fixed}.items())
        options = {}
        if devices.current() == "cuda":
            options = {"user_compute_stream": str(devices.stream().ptr)}
        self._session = _ordered_session(
            devices.current(), name, layout, tuple(sorted(attributes.items())), omitted, tuple(options.items())
        )
        self._binding, self._options = self._session.io_binding(), ort.RunOptions()
        if devices.current() == "cuda":
            self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._held = dict(fixed)
        for port, array in fixed.items():
            array.bind_input(self._binding, port)
        for port, source in aliased.items():
            fixed[source].bind_output(self._binding, port)

    def run(self, inputs: Mapping[str, Resident], outputs: Mapping[str, Resident]) -> None:
        """Enqueue a run; on the host it is done on return."""
        for port, array in inputs.items():
            array.bind_input(self._binding, port)
        for port, array in outputs.items():
            array.bind_output(self._binding, port)
        self._session.run_with_iobinding(self._binding, self._options)


@functools.lru_cache(maxsize=devices.HELD_SESSIONS)
def _ordered_session(
    device: str, name: str, layout: tuple[tuple[str, np.dtype, int], ...], attributes: tuple, omitted: tuple[str, ...],
    options: tuple[tuple[str, str], ...],
) -> ort.InferenceSession:  # fmt: skip
    assert device == devices.current()
    feeds = {port: np.empty((1,) * rank, kind) for port, kind, rank in layout}
    return open_session(name, feeds, dict(attributes), omitted, provider_options=dict(options))


@functools.lru_cache(maxsize=devices.HELD_SESSIONS)
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
        if port.alias >= 0 and (source := operator.inputs[port.alias].name) in inputs:
            bound[port.name] = inputs[source]
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
