"""Asks the operator library for numbers that only its kernels know."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ortolan.custom_ops.library import checked_structure, open_library
from ortolan.element_types import CODE_TYPES, COMPUTE_TYPES, element_type
from ortolan.errors import ConfigError, OpLibraryError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeScratchQuery:
    """One attention layer, the largest step that it may be part of, and the device that runs it.

    Attributes:
        dtype: element type of queries and caches: float32, float16 or bfloat16.
        num_heads: Hq, a multiple of num_kv_heads.
        num_kv_heads: Hkv.
        head_size: D.
        capacity: C, slots that a sequence has in the cache.
        window: W; -1 for no window.
        sink: S.
        max_sequences: sequences of a step, at most.
        max_tokens: tokens of a step, at most, over all its sequences.
        shared_bytes_per_block: shared memory that a block of the device may ask for.
        num_multiprocessors: of the device, or more. No GPU of today has more than the default.
        compute_capability: of the device, 10 * major + minor.
        cache_dtype: element type of caches; None: `dtype`.
    """

    dtype: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    capacity: int
    window: int = -1
    sink: int = 0
    max_sequences: int
    max_tokens: int
    shared_bytes_per_block: int
    num_multiprocessors: int = 256
    compute_capability: int = 90
    cache_dtype: str | None = None

    def __post_init__(self) -> None:
        """Refuse what no layer, step or device has."""
        if self.dtype not in COMPUTE_TYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; it must be one of {', '.join(COMPUTE_TYPES)}")
        if self.cache_dtype not in (None, self.dtype, *CODE_TYPES):
            allowed = ", ".join((self.dtype, *CODE_TYPES))
            raise ConfigError(f"cache_dtype is {self.cache_dtype!r}; it must be None or one of {allowed}")
        positive = ("num_heads", "num_kv_heads", "head_size", "capacity", "max_sequences", "max_tokens")
        for name in (*positive, "shared_bytes_per_block", "num_multiprocessors", "compute_capability"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads is {self.num_heads}; it must be a multiple of {self.num_kv_heads} kv heads")


_FIELDS = (
    "element",
    "cache_element",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "capacity",
    "window",
    "sink",
    "max_sequences",
    "max_tokens",
    "num_multiprocessors",
    "shared_bytes_per_block",
    "compute_capability",
)


class _DecodeScratchQuery(ctypes.Structure):
    """The library's OrtolanDecodeScratchQuery: fields of 8 bytes each."""

    _fields_ = tuple((name, ctypes.c_int64) for name in _FIELDS)


def decode_scratch_bytes(query: DecodeScratchQuery) -> int:
    """Return the bytes of scratch memory that attention asks for in the largest step, one layer.

    Needs no GPU, but a library with CUDA kernels: it computes the sizes that those kernels are launched with.

    Raises:
        OpLibraryError: the library has no CUDA kernels, cannot be loaded, or is of another version.
    """
    library = open_library()
    if not hasattr(library, "ortolan_cuda_decode_scratch_bytes"):
        raise OpLibraryError(
            "the operator library has no CUDA kernels; install a CUDA build of ortolan to ask for their scratch memory"
        )
    structure = checked_structure(library, "ortolan_cuda_decode_scratch_query_bytes", _DecodeScratchQuery)
    library.ortolan_cuda_decode_scratch_bytes.restype = ctypes.c_int64
    library.ortolan_cuda_decode_scratch_bytes.argtypes = [ctypes.POINTER(structure)]
    elements = (element_type(name).onnx for name in (query.dtype, query.cache_dtype or query.dtype))
    filled = structure(*elements, *(getattr(query, name) for name in _FIELDS[2:]))
    answer = int(library.ortolan_cuda_decode_scratch_bytes(ctypes.byref(filled)))
    if answer < 0:
        raise OpLibraryError(f"the operator library has no attention kernel for {query.dtype}; reinstall ortolan")
    return answer
