"""Chooses the execution provider that a device name stands for, and its options."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections.abc import Iterator

from ortolan.custom_ops import library_info
from ortolan.custom_ops.library import onnxruntime_problem
from ortolan.errors import ConfigError, DeviceError

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
WARNINGS, ERRORS = 2, 3  # ONNX Runtime's levels of logging


def resolve_device(device: str | None) -> str:
    """Return the provider for a device name; None takes CUDA where it is usable.

    Raises:
        ConfigError: the name is not "cpu", "cuda" or "cuda:N".
        DeviceError: CUDA is asked for and something of it is missing.
    """
    if device is None:
        return CPU_PROVIDER if cuda_problem() else CUDA_PROVIDER
    if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device is {device!r}; allowed: cpu, cuda, cuda:N")
    if device == "cpu":
        return CPU_PROVIDER
    problem = cuda_problem()
    if problem:
        raise DeviceError(f"device {device!r} cannot be used: {problem}")
    return CUDA_PROVIDER


def device_number(device: str | None) -> int:
    """Return N of "cuda:N"; 0 for every other name."""
    return int(device.partition(":")[2] or 0) if device else 0


def cuda_problem() -> str | None:
    """Say what keeps CUDA from being used, or None."""
    if "cuda" not in library_info().providers:
        return (
            "the operator library was built without CUDA kernels; put nvcc on the path and run `pip install . -C "
            "cmake.define.ORTOLAN_CUDA=ON` in Ortolan's source folder, or use the CPU (device='cpu', --device cpu)"
        )
    import onnxruntime

    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        return onnxruntime_problem() or "onnxruntime has no CUDA provider; install onnxruntime-gpu in its place"
    if importlib.util.find_spec("cupy") is None:
        return "cupy, which holds the caches there, is not installed; run `pip install cupy-cuda13x`"
    return driver_problem()


def driver_problem() -> str | None:
    """Say what cupy finds wrong with the driver or the devices, or None."""
    try:
        import cupy

        count = device_count()
    except ImportError as error:
        return f"cupy cannot be imported ({error}); run `pip install --force-reinstall cupy-cuda13x`"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"the CUDA driver says: {error}; check that nvidia-smi lists a device and that the driver is recent"
    return None if count else "the CUDA driver sees no device; check nvidia-smi and CUDA_VISIBLE_DEVICES"


def device_count() -> int:
    """Return how many devices the CUDA driver shows."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def check_device_number(number: int) -> None:
    """Raise ConfigError where there is no such CUDA device."""
    count = device_count()
    if number >= count:
        raise ConfigError(f"device 'cuda:{number}' does not exist; this machine has cuda:0 .. cuda:{count - 1}")


def preload_cuda_libraries() -> None:
    """Load the CUDA and cuDNN libraries of installed wheels, where ONNX Runtime can; it needs them to start."""
    import onnxruntime

    preload = getattr(onnxruntime, "preload_dlls", None)
    if preload:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it misses; opening the model then says so
            preload()


@contextlib.contextmanager
def quiet_opening(number: int) -> Iterator[None]:
    """Keep ONNX Runtime from warning of each session on another device than the first.

    It looks for a plug-in of the provider first, and warns that there is none where the options name a device. The
    warning goes to the logger of the whole process, whose level cannot be read; it gets back ONNX Runtime's default.
    """
    import onnxruntime

    if number == 0:
        yield
        return
    onnxruntime.set_default_logger_severity(ERRORS)
    try:
        yield
    finally:
        onnxruntime.set_default_logger_severity(WARNINGS)


def cuda_options(number: int, stream_pointer: int, *, graph: bool) -> dict[str, str]:
    """Return the provider options: one stream, memory as it is asked for, and graph capture where wanted.

    Args:
        number: of the device.
        stream_pointer: address of the stream that all work goes to.
        graph: whether runs may be captured as CUDA graphs.
    """
    chosen = {"device_id": str(number)} if number else {}  # where it is named, ONNX Runtime warns, see `quiet_opening`
    return chosen | {
        "user_compute_stream": str(stream_pointer),
        "arena_extend_strategy": "kSameAsRequested",
        "enable_cuda_graph": "1" if graph else "0",
        "use_tf32": "0",
    }
