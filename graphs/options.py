"""What the caller chooses about a decoder graph, beside the model itself."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from ortolan.contract import PAGE_SIZES
from ortolan.errors import ConfigError

ONNX_TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """Options of `build_model`.

    Attributes:
        dtype: element type of weights, activations and caches.
        sink: first positions that every layer keeps and sees.
        snapkv_window: above 0, full-attention layers capture queries and take a physical length.
        page_size: slots of a page; 0 makes contiguous caches.
    """

    dtype: str = "float32"
    sink: int = 0
    snapkv_window: int = 64
    page_size: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ONNX_TYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; allowed: {', '.join(ONNX_TYPES)}")
        if self.sink < 0 or self.snapkv_window < 0:
            raise ConfigError(f"sink {self.sink} and snapkv_window {self.snapkv_window} must be at least 0")

        if self.page_size and self.page_size not in PAGE_SIZES:
            raise ConfigError(f"page_size is {self.page_size!r}; allowed: {', '.join(map(str, PAGE_SIZES))}")

    @property
    def onnx_type(self) -> int:
        """Element type as onnx numbers it."""
        return ONNX_TYPES[self.dtype]
