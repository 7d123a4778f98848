"""The facts about element types, in one table: sizes, and what ONNX, NumPy, safetensors and GPUs call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ortolan.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementType:
    """What is known of one element type.

    Attributes:
        name: as options and manifests spell it.
        bits: of one element; types below 8 bits are packed.
        onnx: number in ONNX's TensorProto.
        onnx_name: as in "tensor(float)".
        numpy: the type of an array of it.
        safetensors: name in that format; "" where it has none.
        storage: NumPy type of equal width that holds its bits where a library lacks the type, as cupy does bfloat16.
        is_float: whether it is a floating-point type.
    """

    name: str
    bits: int
    onnx: int
    onnx_name: str
    numpy: np.dtype[Any]
    safetensors: str
    storage: np.dtype[Any]
    is_float: bool

    @property
    def bytes(self) -> int:
        """Bytes of one element, of types that are not packed."""
        return self.bits // 8

    @property
    def tensor(self) -> str:
        """The type of a tensor of it, as ONNX spells it."""
        return f"tensor({self.onnx_name})"

    @property
    def is_plain(self) -> bool:
        """Whether NumPy itself has the type."""
        return self.numpy.isbuiltin == 1


def _row(name: str, onnx: int, numpy: Any, safetensors: str = "", onnx_name: str = "", bits: int = 0) -> ElementType:
    dtype = np.dtype(numpy)
    is_float = "float" in name
    native = dtype.isbuiltin == 1
    return ElementType(
        name=name,
        bits=bits or 8 * dtype.itemsize,
        onnx=onnx,
        onnx_name=onnx_name or name.replace("_", ""),
        numpy=dtype,
        safetensors=safetensors,
        storage=dtype if native else np.dtype(f"u{dtype.itemsize}"),
        is_float=is_float,
    )


_TABLE = (
    _row("float32", 1, np.float32, "F32", "float"),
    _row("float16", 10, np.float16, "F16"),
    _row("bfloat16", 16, ml_dtypes.bfloat16, "BF16"),
    _row("float64", 11, np.float64, "F64", "double"),
    _row("float8_e4m3fn", 17, ml_dtypes.float8_e4m3fn, "F8_E4M3"),
    _row("float8_e4m3fnuz", 18, ml_dtypes.float8_e4m3fnuz),
    _row("float8_e5m2", 19, ml_dtypes.float8_e5m2, "F8_E5M2"),
    _row("float8_e5m2fnuz", 20, ml_dtypes.float8_e5m2fnuz),
    _row("int4", 22, ml_dtypes.int4, bits=4),
    _row("uint4", 21, ml_dtypes.uint4, bits=4),
    _row("int8", 3, np.int8, "I8"),
    _row("uint8", 2, np.uint8, "U8"),
    _row("int16", 5, np.int16, "I16"),
    _row("uint16", 4, np.uint16, "U16"),
    _row("int32", 6, np.int32, "I32"),
    _row("uint32", 12, np.uint32, "U32"),
    _row("int64", 7, np.int64, "I64"),
    _row("uint64", 13, np.uint64, "U64"),
    _row("bool", 9, np.bool_, "BOOL"),
)
ELEMENT_TYPES: Mapping[str, ElementType] = {row.name: row for row in _TABLE}
COMPUTE_TYPES = ("float32", "float16", "bfloat16")  # of activations
CPU_TYPES = ("float32", "float16")  # those that the CPU computes
CODE_TYPES = ("int8", "float8_e4m3fn")  # of caches that hold codes and scales
CACHE_FORMATS = {"fp8": "float8_e4m3fn", "int8": "int8"}  # low-bit caches, as options name them

_BY_ONNX = {row.onnx: row for row in _TABLE}
_BY_NUMPY = {row.numpy: row for row in _TABLE}
_BY_SAFETENSORS = {row.safetensors: row for row in _TABLE if row.safetensors}


def element_type(name: str) -> ElementType:
    """Return a type by its name.

    Raises:
        ConfigError: there is no such type.
    """
    if name not in ELEMENT_TYPES:
        raise ConfigError(f"element type {name!r} is not known; allowed: {', '.join(ELEMENT_TYPES)}")
    return ELEMENT_TYPES[name]


def cache_type(option: str | None, dtype: str) -> str:
    """Return the element type of caches that an option `cache_dtype` stands for; None: that of activations.

    Raises:
        ConfigError: the option has another value than those allowed.
    """
    if option is None:
        return dtype
    if not isinstance(option, str) or option not in (dtype, *CACHE_FORMATS):
        raise ConfigError(f"cache_dtype is {option!r}; allowed: None, {dtype!r} (the dtype), 'fp8' or 'int8'")
    return CACHE_FORMATS.get(option, dtype)


def from_onnx(number: int) -> ElementType:
    """Return a type by ONNX's number of it.

    Raises:
        UnsupportedModelError: it has no fixed size, as text has not, or it is newer than this table.
    """
    if number not in _BY_ONNX:
        raise UnsupportedModelError(f"ONNX element type {number} is not supported")
    return _BY_ONNX[number]


def from_numpy(dtype: Any) -> ElementType:
    """Return a type by NumPy's; raises KeyError for one that ONNX does not have."""
    return _BY_NUMPY[np.dtype(dtype)]


def from_safetensors(name: str) -> ElementType | None:
    """Return a type by its name in safetensors; None for one that is not known."""
    return _BY_SAFETENSORS.get(name)
