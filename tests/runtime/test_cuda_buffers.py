"""What CUDA reports becomes Ortolan's errors, whichever call of the buffers meets it."""

import contextlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ortolan.errors import CapacityError, OrtolanError
from ortolan.runtime.device.cuda import CudaBuffers


class CudaError(RuntimeError):
    """As cupy's own: a status and a text."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class CudaRuntimeError(CudaError):
    """Stands for cupy's CUDARuntimeError."""


class CudaDriverError(CudaError):
    """Stands for cupy's CUDADriverError."""


class PoolError(MemoryError):
    """Stands for cupy's OutOfMemoryError."""


class Failing:
    """An array, event or pool, each call of which fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def fail(self, *_, **__):
        raise self._error

    get = malloc = record = synchronize = free_all_blocks = copy_from_host_async = fail

    @property
    def data(self) -> "Failing":
        return self


class Stream(Failing):
    """A stream that can be made current, and nothing else."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_) -> None:
        pass


@pytest.fixture
def make_buffers(monkeypatch):
    """Return a function that makes buffers on a device where all that can fail does."""

    def make(error: Exception) -> CudaBuffers:
        failing = Failing(error)
        cuda = SimpleNamespace(
            runtime=SimpleNamespace(CUDARuntimeError=CudaRuntimeError, memGetInfo=failing.fail),
            driver=SimpleNamespace(CUDADriverError=CudaDriverError),
            memory=SimpleNamespace(OutOfMemoryError=PoolError),
            Device=lambda number: contextlib.nullcontext(),
            Stream=lambda non_blocking: Stream(error),
            MemoryPool=lambda: failing,
            PinnedMemoryPool=lambda: failing,
            Event=failing.fail,
            get_elapsed_time=failing.fail,
        )
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
        return CudaBuffers(0)

    return make


def compute(buffers: CudaBuffers, array: Failing) -> None:
    with buffers.scope():
        array.get()


CALLS = {
    "write": lambda buffers, failing: buffers.write(failing, np.zeros(3)),
    "upload": lambda buffers, failing: buffers.upload(np.zeros(3)),
    "allocate": lambda buffers, failing: buffers.allocate((3,), np.float32),
    "pinned": lambda buffers, failing: buffers.pinned((3,), np.float32),
    "staging": lambda buffers, failing: buffers.staging((3,), np.float32),
    "download": lambda buffers, failing: buffers.download(failing),
    "event": lambda buffers, failing: buffers.event(),
    "record": lambda buffers, failing: buffers.record(failing),
    "wait": lambda buffers, failing: buffers.wait(failing),
    "seconds_between": lambda buffers, failing: buffers.seconds_between(failing, failing),
    "synchronize": lambda buffers, failing: buffers.synchronize(),
    "trim": lambda buffers, failing: buffers.trim(),
    "memory": lambda buffers, failing: buffers.memory(),
    "arithmetic": compute,
}


@pytest.mark.parametrize("kind", [CudaRuntimeError, CudaDriverError])
@pytest.mark.parametrize("call", CALLS)
def test_a_fault_of_the_device_is_named(make_buffers, call, kind):
    error = kind(716)  # a misaligned address
    with pytest.raises(OrtolanError, match="cuda:0 failed: status 716; start a new process") as raised:
        CALLS[call](make_buffers(error), Failing(error))
    assert not isinstance(raised.value, CapacityError)


def test_pinned_memory_that_there_is_none_of_is_no_fault_of_the_device(make_buffers):
    with pytest.raises(CapacityError, match="cannot allocate 12 bytes of pinned host memory"):
        make_buffers(CudaRuntimeError(2)).pinned((3,), np.float32)


@pytest.mark.parametrize("error", [CudaRuntimeError(2), CudaDriverError(2), PoolError("none")])
def test_memory_that_there_is_none_of_for_arithmetic_is_no_fault_of_the_device(make_buffers, error):
    with pytest.raises(CapacityError, match="cuda:0 has no memory left for this"):
        compute(make_buffers(error), Failing(error))
