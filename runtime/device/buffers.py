"""Memory for caches, captures and step inputs: NumPy arrays on the host, or what a device module provides."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortolan import contract
from ortolan.element_types import ElementType, element_type, from_numpy
from ortolan.errors import CapacityError
from ortolan.runtime.device.host_tables import as_initializer

Array: TypeAlias = Any  # numpy.ndarray on the host, cupy.ndarray on a device


class Buffers(Protocol):
    """Where the arrays of a session live."""

    def scope(self) -> AbstractContextManager[Any]:
        """Return the context in which array arithmetic belongs: a device and its stream."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Allocate an array that holds anything; `dtype` is a manifest's. Raises CapacityError."""

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Allocate an array of any element type that holds anything. Raises CapacityError."""

    def write(self, target: Array, source: npt.NDArray[Any]) -> None:
        """Overwrite an array with a host array of its shape and type, which may be changed at once."""

    def bind_input(self, binding: Any, name: str, array: Array) -> None:
        """Bind an array, which must outlive the binding's runs, as an input."""

    def bind_output(self, binding: Any, name: str, array: Array) -> None:
        """Bind an array as an output of its shape."""

    def bind_in_place(self, binding: Any, name: str, array: Array) -> None:
        """Bind an array as an input and as the output that aliases it."""

    def rare_run_options(self) -> Any:
        """Return run options for a graph that runs rarely, and should hold no memory in between; None: the usual."""

    def host_table(self, rows: npt.NDArray[Any], element: ElementType) -> Any:
        """Make an OrtValue of a large table that stays in host memory, of rows that are mapped from a file."""

    def weight(self, rows: npt.NDArray[Any], element: ElementType) -> Any:
        """Make an OrtValue of a weight, of rows that are mapped from a file. Raises CapacityError."""

    def staging(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any] | None:
        """Allocate host memory that `download` is quick to fill; None where nothing needs to be brought."""

    def download(self, array: Array, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return an array's contents on the host, once all work before is done.

        A view where it lives there, else `out`, of its shape and type, where that is given.
        """

    def trim(self) -> None:
        """Give memory that no array uses back to the system."""


class HostBuffers:
    """Arrays in host memory."""

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Allocate an array that holds anything."""
        return self.allocate(shape, element_type(dtype).numpy)

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Allocate an array of any element type that holds anything."""
        try:
            return np.empty(shape, dtype)
        except MemoryError as error:
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            raise CapacityError(f"cannot allocate an array of {size} bytes, shape {list(shape)}") from error

    def write(self, target: Array, source: npt.NDArray[Any]) -> None:
        """Overwrite an array."""
        target[:] = source

    def bind_input(self, binding: Any, name: str, array: Array) -> None:
        """Bind an array as an input."""
        binding.bind_ortvalue_input(name, wrap(array))

    def bind_output(self, binding: Any, name: str, array: Array) -> None:
        """Bind an array as an output."""
        binding.bind_ortvalue_output(name, wrap(array))

    def bind_in_place(self, binding: Any, name: str, array: Array) -> None:
        """Bind an array as an input and as the output that aliases it."""
        value = wrap(array)
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(contract.output(name), value)

    def rare_run_options(self) -> Any:
        """Return None: the usual run options."""
        return None

    def host_table(self, rows: npt.NDArray[Any], element: ElementType) -> Any:
        """Make an OrtValue over the mapped rows themselves."""
        return as_initializer(rows, element)

    def weight(self, rows: npt.NDArray[Any], element: ElementType) -> Any:
        """Make an OrtValue over the mapped rows themselves."""
        return as_initializer(rows, element)

    def staging(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        """Return None: arrays are on the host."""

    def download(self, array: Array, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return the array itself."""
        result: npt.NDArray[Any] = array
        return result

    def trim(self) -> None:
        """Do nothing: NumPy frees arrays at once."""


def wrap(array: npt.NDArray[Any]) -> Any:
    """Make an OrtValue over an array's memory; the array must outlive it."""
    kind = from_numpy(array.dtype)
    if kind.is_plain:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, kind.onnx)
