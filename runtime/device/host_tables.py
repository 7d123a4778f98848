"""Keeps the table of per-layer embeddings in host memory, where a device's kernels read the rows that they need.

ONNX Runtime takes an initializer from the caller in the place of the file's, wherever its memory lies. On CUDA that is
pinned memory of the host, whose address is the same on the device: a lookup reads a row for each token over the bus,
inside captured graphs, too, and nothing waits for the host. On the CPU it is the file itself, mapped.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ortolan import contract
from ortolan.element_types import ElementType, from_onnx
from ortolan.errors import ConfigError, OpLibraryError

DL_CPU, DL_CUDA = 1, 2  # devices, as DLPack numbers them
_CAPSULE = b"dltensor"
_TYPE_CODES = {"float32": 2, "float16": 2, "bfloat16": 4}  # of DLPack
SHARED_TYPES = frozenset(_TYPE_CODES)  # of rows that can be handed over


class _SharedTensor(ctypes.Structure):
    """The head of DLPack's DLManagedTensor, in its layout."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("axes", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


class Place(Protocol):
    """Where a table is put."""

    def host_table(self, rows: npt.NDArray[Any], element: ElementType) -> Any:
        """Make an OrtValue of rows that are mapped from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTable:
    """A weight of a graph, where its file holds it.

    Attributes:
        name: of the initializer.
        file: of the folder.
        offset: of its first byte.
        shape: [V, layers * size].
        element: type.
    """

    name: str
    file: str
    offset: int
    shape: tuple[int, ...]
    element: ElementType

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.element.bytes

    def map(self, folder: Path) -> npt.NDArray[Any]:
        """Map the rows from the file; nothing is read yet, and what is written to them stays in memory."""
        return np.memmap(folder / self.file, self.element.storage, mode="c", offset=self.offset, shape=self.shape)


def find_layer_table(graph: Path) -> HostTable:
    """Find the table of per-layer embeddings of a graph.

    Raises:
        ConfigError: the model has none.
    """
    import onnx

    for tensor in onnx.load_model(graph, load_external_data=False).graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.name == contract.LAYER_TABLE and place:
            return HostTable(
                name=tensor.name,
                file=place["location"],
                offset=int(place.get("offset", 0)),
                shape=tuple(tensor.dims),
                element=from_onnx(tensor.data_type),
            )
    raise ConfigError(
        f"host_embeddings is True, but the model in {graph.parent} has no per-layer embeddings; leave it out "
        "(--host-embeddings)"
    )


def give_layer_table(graph: Path, place: Place) -> tuple[dict[str, Any], int]:
    """Put a graph's per-layer embeddings into host memory; returns the OrtValue by its name, and its bytes.

    Raises:
        ConfigError: the model has none.
        CapacityError: there is no memory for them.
    """
    table = find_layer_table(graph)
    return {table.name: place.host_table(table.map(graph.parent), table.element)}, table.bytes


def as_initializer(rows: Any, element: ElementType, device: tuple[int, int] = (DL_CPU, 0)) -> Any:
    """Make an OrtValue over rows, which it keeps alive.

    Args:
        rows: of the element's storage type, in host memory that the device reads at the same address, or on the device.
        element: what their bits stand for.
        device: kind and number, as DLPack has them.

    Raises:
        OpLibraryError: this onnxruntime takes no memory of others.
    """
    import onnxruntime

    capsule = share(rows, element, device)
    try:
        return onnxruntime.OrtValue.from_dlpack(capsule)
    except AttributeError as error:
        raise OpLibraryError(
            f"onnxruntime {onnxruntime.__version__} has no OrtValue.from_dlpack, which host_embeddings needs; install "
            "a later one, or leave host_embeddings out (--host-embeddings)"
        ) from error


def share(rows: Any, element: ElementType, device: tuple[int, int]) -> Any:
    """Return rows as a DLPack capsule that names another device and type than NumPy would."""
    capsule = rows.__dlpack__()
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = ctypes.cast(get_pointer(capsule, _CAPSULE), ctypes.POINTER(_SharedTensor)).contents
    tensor.device_type, tensor.device_id = device
    tensor.type_code, tensor.bits = _TYPE_CODES[element.name], element.bits
    return capsule
