"""The operators alone: the shared library, its registration with ONNX Runtime, and its onnx schemas."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ortolan.custom_ops.library import LibraryInfo, library_info, library_path, register

if TYPE_CHECKING:
    from ortolan.custom_ops.onnx_schemas import register_schemas

__all__ = ["LibraryInfo", "library_info", "library_path", "register", "register_schemas"]


def __getattr__(name: str) -> Any:
    """Import what needs onnx on first use: to run a model takes ONNX Runtime alone."""
    if name != "register_schemas":
        raise AttributeError(f"module 'ortolan.custom_ops' has no attribute {name!r}")
    return importlib.import_module("ortolan.custom_ops.onnx_schemas").register_schemas


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
