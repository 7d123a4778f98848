"""Opens the operator library's plain C functions, and declares the structs that they take."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ortolan.custom_ops import library as library_module
from ortolan.custom_ops.library import check_size, checked_structure, library_path
from ortolan.errors import OpLibraryError, OrtolanError


def _fields(*names: str) -> tuple[tuple[str, type[ctypes.c_uint64]], ...]:
    return tuple((name, ctypes.c_uint64) for name in names)


class DecodeAdvance(ctypes.Structure):
    """One call of ortolan_cuda_decode_advance; fields of 8 bytes each, addresses and counts."""

    _fields_ = _fields(
        *("device", "logits", "rules", "seen", "num_sequences", "vocab_size", "random", "produced", "token_ids"),
        *("positions", "past_len", "kv_len", "num_kv_lens", "advance_tokens", "workspace", "stream"),
    )


class TopLogprobs(ctypes.Structure):
    """One call of ortolan_cuda_top_logprobs; fields of 8 bytes each, addresses and counts."""

    _fields_ = _fields(
        *("device", "logits", "tokens", "num_rows", "vocab_size", "k", "results", "workspace", "stream"),
    )


SAMPLING_RULE = np.dtype(  # as cuda::SamplingRule
    [
        ("tail_mass", np.float64),
        ("seed", np.uint64),
        ("draw", np.uint64),
        ("inverse_temperature", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("top_k", np.int32),
    ]
)


def open_library() -> Any:
    """Open the library.

    Raises:
        OpLibraryError: it was built without CUDA, or for another version of these structs.
    """
    library: Any = library_module.open_library()
    try:
        library.ortolan_cuda_decode_advance.argtypes = [ctypes.c_void_p]
        library.ortolan_cuda_decode_workspace.restype = ctypes.c_int64
        library.ortolan_cuda_decode_workspace.argtypes = [ctypes.c_int64]
        library.ortolan_cuda_top_logprobs.argtypes = [ctypes.c_void_p]
        library.ortolan_cuda_logprobs_workspace.restype = ctypes.c_int64
        library.ortolan_cuda_logprobs_workspace.argtypes = [ctypes.c_int64] * 3
        library.ortolan_cuda_error_text.restype = ctypes.c_char_p
    except AttributeError as error:
        raise OpLibraryError(
            f"{library_path()} lacks CUDA functions ({error}); build it with a CUDA compiler, or use device='cpu'"
        ) from error
    checked_structure(library, "ortolan_cuda_decode_advance_bytes", DecodeAdvance)
    checked_structure(library, "ortolan_cuda_top_logprobs_bytes", TopLogprobs)
    check_size(library, "ortolan_cuda_sampling_rule_bytes", "SamplingRule", SAMPLING_RULE.itemsize)
    return library


def call(library: Any, function: Any, argument: ctypes.Structure) -> None:
    """Call a function with a struct. Raises OrtolanError where it fails."""
    code = function(ctypes.byref(argument))
    if code:
        text = library.ortolan_cuda_error_text(code).decode()
        raise OrtolanError(f"choosing tokens failed on cuda:{argument.device}: {text}")
