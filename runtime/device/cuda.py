"""Holds one CUDA device for one model: its stream, its memory, and how arrays are bound to ONNX Runtime.

All work of a model, ONNX Runtime's own included, goes to one stream, so that nothing waits for the host and memory
that the pool hands out again is reused in stream order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan import contract
from ortolan.element_types import ElementType, element_type
from ortolan.errors import CapacityError, OrtolanError
from ortolan.runtime.device.buffers import Array, wrap
from ortolan.runtime.device.host_tables import DL_CUDA, as_initializer

GRAPH_TYPES = (
    "float32",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "int8",
    "float8_e4m3fn",
)  # of inputs and outputs of graphs

# cupy lacks bfloat16, so its bits are held as uint16, which no input or output of a graph is otherwise.
ELEMENT_TYPES = {str(kind.storage): kind.onnx for kind in map(element_type, GRAPH_TYPES)}
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY
MIN_BYTES = 256  # an array without elements still gets an address


class _Failures(AbstractContextManager[None]):
    """Turns errors of CUDA into OrtolanError, out of memory into CapacityError, inside of other contexts.

    One object serves all uses, also nested ones: a step enters dozens of them.
    """

    def __init__(self, cupy: ModuleType, device_id: int, *contexts: AbstractContextManager[object]) -> None:
        self._contexts, self._device_id = contexts, device_id
        self._out_of_memory = cupy.cuda.memory.OutOfMemoryError
        self._failures = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)

    def __enter__(self) -> None:
        try:
            for context in self._contexts:
                context.__enter__()
        except self._failures as error:
            raise self._translated(error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for context in reversed(self._contexts):
            context.__exit__(kind, error, trace)
        if isinstance(error, (self._out_of_memory, *self._failures)):
            raise self._translated(error) from error

    def _translated(self, error: BaseException) -> OrtolanError:
        if isinstance(error, self._out_of_memory) or getattr(error, "status", None) == OUT_OF_MEMORY:
            return CapacityError(f"cuda:{self._device_id} has no memory left for this: {error}")
        return OrtolanError(f"cuda:{self._device_id} failed: {error}; start a new process")


class CudaBuffers:
    """Arrays in the memory of one CUDA device, on one stream."""

    def __init__(self, device_id: int) -> None:
        import cupy

        self._cupy: ModuleType = cupy
        self.device_id = device_id
        self._device = cupy.cuda.Device(device_id)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._failures = _Failures(cupy, device_id)
        self._on_device = _Failures(cupy, device_id, self._device)
        self._on_stream = _Failures(cupy, device_id, self._device, self._stream)
        self._pool = cupy.cuda.MemoryPool()
        self._pinned_pool = cupy.cuda.PinnedMemoryPool()  # own, so that only later work of this stream reuses it

    @property
    def stream_pointer(self) -> int:
        """The stream, as an address."""
        return int(self._stream.ptr)

    @property
    def pool_bytes(self) -> int:
        """Device memory that this pool holds, used or not."""
        return int(self._pool.total_bytes())

    @property
    def shared_bytes_per_block(self) -> int:
        """Shared memory that a block of a kernel may ask for."""
        return int(self._device.attributes["MaxSharedMemoryPerBlockOptin"])

    def scope(self) -> AbstractContextManager[None]:
        """Make the device and the stream current for array arithmetic.

        Raises:
            CapacityError: the device has no memory for a result.
            OrtolanError: a kernel failed; the device cannot be used by this process any more.
        """
        return self._on_stream

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Allocate an array that holds anything."""
        return self.allocate(shape, element_type(dtype).storage)

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Allocate an array of any element type.

        Raises:
            CapacityError: the device has no memory for it.
        """
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        try:
            with self.scope():
                memory = self._pool.malloc(max(size, MIN_BYTES))
                return self._cupy.ndarray(shape, dtype, memory)
        except CapacityError as error:
            free, total = self.memory()
            raise CapacityError(
                f"cannot allocate an array of {size} bytes, shape {list(shape)}: cuda:{self.device_id} has {free} of "
                f"{total} bytes free"
            ) from error

    def upload(self, array: npt.NDArray[Any]) -> Array:
        """Copy a host array to the device; the host array may be changed at once, pinned memory once it is copied.

        Raises:
            CapacityError: the device has no memory for it.
            OrtolanError: as `scope`.
        """
        result = self.allocate(array.shape, array.dtype)
        self.write(result, array)
        return result

    def write(self, target: Array, source: npt.NDArray[Any]) -> None:
        """Overwrite a device array, all of it, with a host array of its shape and type; of the latter see `upload`."""
        source = np.ascontiguousarray(source)
        with self._failures:
            target.data.copy_from_host_async(source.ctypes.data, source.nbytes, self._stream)

    def staging(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Allocate host memory that `download` is quick to fill."""
        return self.pinned(shape, dtype)

    def download(self, array: Array, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Wait for all work before, and copy an array to the host: to `out`, where that is given."""
        with self.scope():
            result: npt.NDArray[Any] = array.get(out=out)
            return result

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Allocate host memory that kernels can write; its address is the same on the device.

        Raises:
            CapacityError: the host has no memory that can be pinned.
            OrtolanError: as `scope`.
        """
        size = int(np.prod(shape, dtype=np.int64))
        size_bytes = size * np.dtype(dtype).itemsize
        try:
            with self._on_device:
                memory = self._pinned_pool.malloc(max(size_bytes, MIN_BYTES))
        except CapacityError as error:
            raise CapacityError(f"cannot allocate {size_bytes} bytes of pinned host memory") from error
        return np.frombuffer(memory, dtype, size).reshape(shape)

    def host_table(self, rows: npt.NDArray[Any], element: ElementType) -> Any:
        """Make an OrtValue over a copy of rows in pinned memory, which kernels read over the bus.

        A mapped file could be pinned as it is on some systems alone; a copy can on all.

        Raises:
            CapacityError: the host has no memory that can be pinned.
        """
        pinned = self.pinned(rows.shape, rows.dtype)
        pinned[...] = rows
        return as_initializer(pinned, element, (DL_CUDA, self.device_id))

    def weight(self, rows: npt.NDArray[Any], element: ElementType) -> Any:
        """Make an OrtValue over a copy of rows on the device. Raises CapacityError."""
        held = self.upload(rows)
        self.synchronize()
        with self.scope():
            return as_initializer(held, element, (DL_CUDA, self.device_id))

    def event(self) -> Any:
        """Make an event that `record` marks and `wait` waits for."""
        with self._on_device:
            return self._cupy.cuda.Event()

    def record(self, event: Any) -> None:
        """Mark the end of all work enqueued so far."""
        with self._failures:
            event.record(self._stream)

    def wait(self, event: Any) -> None:
        """Wait until the work before an event is done.

        Raises:
            OrtolanError: a kernel failed; the device cannot be used by this process any more.
        """
        with self._failures:
            event.synchronize()

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Return the device time between two events that have passed."""
        with self._failures:
            return float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1000

    def synchronize(self) -> None:
        """Wait for everything on the stream. Raises as `wait`."""
        with self._failures:
            self._stream.synchronize()

    def bind_input(self, binding: Any, name: str, array: Array) -> None:
        """Bind an array as an input."""
        binding.bind_input(name, "cuda", self.device_id, ELEMENT_TYPES[array.dtype.name], array.shape, array.data.ptr)

    def bind_host_input(self, binding: Any, name: str, array: npt.NDArray[Any]) -> None:
        """Bind a host array, which must outlive the binding's runs, as an input that operators read on the host."""
        binding.bind_ortvalue_input(name, wrap(array))

    def bind_output(self, binding: Any, name: str, array: Array) -> None:
        """Bind an array as an output."""
        binding.bind_output(name, "cuda", self.device_id, ELEMENT_TYPES[array.dtype.name], array.shape, array.data.ptr)

    def bind_in_place(self, binding: Any, name: str, array: Array) -> None:
        """Bind an array as an input and as the output that aliases it."""
        self.bind_input(binding, name, array)
        self.bind_output(binding, contract.output(name), array)

    def rare_run_options(self) -> Any:
        """Return run options under which ONNX Runtime gives its intermediate results' memory back afterwards."""
        import onnxruntime

        options = onnxruntime.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", f"gpu:{self.device_id}")
        return options

    def trim(self) -> None:
        """Give memory that no array uses back to the device; waits for the stream."""
        self.synchronize()
        with self._on_device:
            self._pool.free_all_blocks()

    def memory(self) -> tuple[int, int]:
        """Return the free and all bytes of the device, whoever uses them."""
        with self._on_device:
            free, total = self._cupy.cuda.runtime.memGetInfo()
        return int(free), int(total)
