"""Chooses the execution provider that a device name stands for."""

from __future__ import annotations

import re

from ortolan.custom_ops import library_info
from ortolan.custom_ops.library import onnxruntime_problem
from ortolan.errors import ConfigError, OpLibraryError

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"


def resolve_device(device: str | None) -> str:
    """Return the provider for a device name; None takes CUDA where it is usable.

    Raises:
        ConfigError: the name is none of "cpu", "cuda", "cuda:N".
        OpLibraryError: CUDA is asked for and something of it is missing.
    """
    if device is None:
        return CPU_PROVIDER if cuda_problem() else CUDA_PROVIDER
    if device == "cpu":
        return CPU_PROVIDER
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise ConfigError(f"device is {device!r}; allowed: cpu, cuda, cuda:N")
    problem = cuda_problem()
    if problem:
        raise OpLibraryError(f"device {device!r} cannot be used: {problem}")
    return CUDA_PROVIDER


def cuda_problem() -> str | None:
    """Say what keeps CUDA from being used, or None."""
    if "cuda" not in library_info().providers:
        return "the operator library was built without CUDA kernels; use device='cpu'"
    import onnxruntime

    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        return onnxruntime_problem() or "onnxruntime has no CUDA provider; install onnxruntime-gpu in its place"
    return None
