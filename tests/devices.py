"""Where operator tests run: on the host, or on a GPU through buffers that start as NaN."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

import ortolan.custom_ops
from ortolan.custom_ops.schema import OPERATORS
from ortolan.element_types import ELEMENT_TYPES, element_type, from_numpy

BFLOAT16 = element_type("bfloat16").numpy
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
ONNX_TYPES = {kind.numpy: kind.onnx for kind in ELEMENT_TYPES.values()}
HOST_PORTS = {port.name for operator in OPERATORS for port in operator.inputs if port.on_host}
HELD_SESSIONS = 24  # that tests keep open at a time: each takes 150 MB of a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device and the element type that its operators are tested with."""

    device: str
    element: np.dtype


TARGETS = {
    f"{device}-{element.name}": Target(device=device, element=element)
    for device, elements in {
        "cpu": (np.dtype(np.float32), np.dtype(np.float16)),
        "cuda": (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16),
    }.items()
    for element in elements
}
_target: contextvars.ContextVar[Target] = contextvars.ContextVar("target", default=TARGETS["cpu-float32"])


def current() -> str:
    """Return the device that tests run on now: "cpu" or "cuda"."""
    return _target.get().device


def element() -> np.dtype:
    """Return the element type that tests draw now."""
    return _target.get().element


@contextlib.contextmanager
def using(target: Target) -> Iterator[None]:
    """Run what follows on another target."""
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


@functools.cache
def cuda_problem() -> str | None:
    """Say why nothing can run on a GPU here, or None."""
    if "cuda" not in ortolan.custom_ops.library_info().providers:
        return "the operator library was built without CUDA kernels"
    if PROVIDERS["cuda"] not in ort.get_available_providers():
        return "onnxruntime has no CUDA provider"
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "no GPU"
    except Exception as error:  # a missing package, or a driver that does not answer
        return f"cupy finds no GPU: {error}"


def compute_capability() -> int:
    """Return the GPU's compute capability, ten times its major number plus the minor one."""
    import cupy

    return int(cupy.cuda.Device().compute_capability)


def run(
    session: ort.InferenceSession,
    feeds: Mapping[str, np.ndarray],
    outputs: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    in_place: Mapping[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """Run a session on copies of `feeds`; `in_place` binds an output to the buffer of an input.

    Args:
        session: made for the current device.
        feeds: inputs by name.
        outputs: shape and type of every output; its buffer starts as NaN, so that what is not written shows.
        in_place: input name by output name.
    """
    device, binding = current(), session.io_binding()
    on_device = {name: array for name, array in feeds.items() if name not in HOST_PORTS}
    for name in feeds.keys() & HOST_PORTS:
        binding.bind_cpu_input(name, feeds[name])  # from a device, ONNX Runtime would read it before its copy is done
    buffers = {name: upload(array) for name, array in on_device.items()}
    for name, array in on_device.items():
        binding.bind_input(name, device, 0, ONNX_TYPES[array.dtype], array.shape, _address(buffers[name]))
    results = {}
    for name, (shape, dtype) in outputs.items():
        source = (in_place or {}).get(name)
        results[name] = buffers[source] if source else poison(shape, dtype)
        binding.bind_output(name, device, 0, ONNX_TYPES[dtype], shape, _address(results[name]))
    synchronize()  # a session on a GPU has a stream of its own
    session.run_with_iobinding(binding)
    synchronize()
    for name, array in on_device.items():
        if name not in (in_place or {}).values():
            after = _download(buffers[name])[: array.size]
            assert np.array_equal(after.view(np.uint8), _storage(array).view(np.uint8)), f"input {name} was changed"
    return {
        name: _download(results[name]).view(dtype)[: np.prod(shape, dtype=int)].reshape(shape)
        for name, (shape, dtype) in outputs.items()
    }


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Assert equal shapes, types and bits; NaN equals itself, which bfloat16 arrays do not know."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(*(np.ascontiguousarray(a).view(f"u{a.itemsize}") for a in (actual, expected)))


def poison(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Return device memory, flat, that holds NaN; one element at least, as a buffer of none has no address."""
    return upload(np.full(max(1, np.prod(shape, dtype=int)), np.nan, dtype))


def upload(array: np.ndarray) -> Any:
    """Copy an array to the device, flat; bfloat16 as its bits. One of no elements gets an address all the same."""
    return array_module().array(_storage(array) if array.size else np.zeros(8, np.uint8))


def _address(buffer: Any) -> int:
    return int(buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.data.ptr)


def _download(buffer: Any) -> np.ndarray:
    return buffer if isinstance(buffer, np.ndarray) else array_module().asnumpy(buffer)


def array_module() -> Any:
    """Return NumPy, or cupy on a GPU."""
    if current() == "cpu":
        return np
    import cupy

    return cupy


def widen(array: Any, kind: type) -> Any:
    """Bring an array to the device as `kind`, float32 or float64; bfloat16 may come as its bits."""
    xp = array_module()
    if array.dtype == BFLOAT16 and current() == "cuda":
        array = array.view(np.uint16)
    array = xp.asarray(array)
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(kind)


def rounded(values: Any, element: np.dtype) -> Any:
    """Round float32 values to an element type, to the nearest and then to even; returns float32."""
    if element != BFLOAT16:
        return values.astype(element).astype(np.float32)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


@functools.cache
def stream() -> Any:
    """Return a stream of the GPU that work can be ordered on."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def on_stream() -> contextlib.AbstractContextManager[object]:
    """Order all array work in the block on `stream`; on the host there is nothing to order."""
    return contextlib.nullcontext() if current() == "cpu" else stream()


def free_memory() -> None:
    """Return what cupy keeps of the GPU's memory, where it keeps more than a little."""
    import cupy

    pool = cupy.get_default_memory_pool()
    if pool.total_bytes() > 1 << 28:
        pool.free_all_blocks()


def synchronize() -> None:
    """Wait for the device, whatever stream its work is on."""
    if current() == "cuda":
        import cupy

        cupy.cuda.runtime.deviceSynchronize()


def storage_type(dtype: np.dtype) -> np.dtype:
    """Return the type that holds a type's bits in cupy, which has neither bfloat16 nor fp8."""
    return from_numpy(dtype).storage


def _storage(array: np.ndarray) -> np.ndarray:
    """Flatten, and view types that cupy lacks as integers: bfloat16 and fp8."""
    return np.ascontiguousarray(array).reshape(-1).view(storage_type(array.dtype))
