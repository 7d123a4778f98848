"""The operators alone: the shared library, its registration with ONNX Runtime, and its onnx schemas."""

from ortolan.custom_ops.library import LibraryInfo, library_info, library_path, register
from ortolan.custom_ops.onnx_schemas import register_schemas

__all__ = ["LibraryInfo", "library_info", "library_path", "register", "register_schemas"]
