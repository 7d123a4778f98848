"""What the caller chooses about a decoder graph, beside the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ortolan.contract import PAGE_SIZES
from ortolan.element_types import CODE_TYPES, COMPUTE_TYPES, element_type
from ortolan.errors import ConfigError

Fusion: TypeAlias = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """Options of `build_model`.

    Attributes:
        dtype: element type of activations.
        cache_dtype: element type of caches; None takes that of activations.
        sink: first positions that every layer keeps and sees.
        snapkv_window: above 0, full-attention layers capture queries and take a physical length.
        page_size: slots of a page; 0 makes contiguous caches.
        fused_for: device whose fewer, larger operators are used; None: those that every ONNX tool knows.
    """

    dtype: str = "float32"
    cache_dtype: str | None = None
    sink: int = 0
    snapkv_window: int = 64
    page_size: int = 0
    fused_for: Fusion | None = None

    def __post_init__(self) -> None:
        if self.dtype not in COMPUTE_TYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; allowed: {', '.join(COMPUTE_TYPES)}")
        if self.cache_dtype not in (None, self.dtype, *CODE_TYPES):
            allowed = f"None, the dtype {self.dtype!r}, {', '.join(map(repr, CODE_TYPES))}"
            raise ConfigError(f"cache_dtype is {self.cache_dtype!r}; allowed: {allowed}")
        if self.sink < 0 or self.snapkv_window < 0:
            raise ConfigError(f"sink {self.sink} and snapkv_window {self.snapkv_window} must be at least 0")
        if self.page_size and self.page_size not in PAGE_SIZES:
            raise ConfigError(f"page_size is {self.page_size!r}; allowed: {', '.join(map(str, PAGE_SIZES))}")

    @property
    def fused(self) -> bool:
        """Whether fewer, larger operators are used."""
        return self.fused_for is not None

    @property
    def onnx_type(self) -> int:
        """Element type of activations, as onnx numbers it."""
        return element_type(self.dtype).onnx

    @property
    def has_code_caches(self) -> bool:
        """Whether caches hold codes, with a scale for each row."""
        return self.cache_dtype in CODE_TYPES

    @property
    def cache_onnx_type(self) -> int:
        """Element type of caches, as onnx numbers it."""
        return element_type(self.cache_dtype or self.dtype).onnx
