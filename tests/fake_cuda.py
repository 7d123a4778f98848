"""A CUDA device made of NumPy arrays: what a device session enqueues happens at once, on the CPU provider."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import ortolan
from ortolan import Sampling, SnapKv, contract
from ortolan.errors import CapacityError
from ortolan.runtime import device_session
from ortolan.runtime.buffers import wrap
from ortolan.runtime.cuda import CudaBuffers
from ortolan.runtime.device_session import DeviceModel, DeviceSession
from ortolan.runtime.plan import plan_caches
from ortolan.runtime.sampler import distribution, penalize

TOTAL_BYTES = 2**30


class FakeCuda(CudaBuffers):
    """Counts what it holds, and refuses more than `TOTAL_BYTES`."""

    def __init__(self) -> None:
        self.device_id = 0
        self.trims = 0
        self.waits = 0
        self.synchronizations = 0
        self.fail_wait = False

    @property
    def stream_pointer(self) -> int:
        return 0

    @property
    def pool_bytes(self) -> int:
        return 0

    @property
    def shared_bytes_per_block(self) -> int:
        return 232448

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        yield

    def empty(self, shape, dtype):
        return self.allocate(shape, dtype)

    def allocate(self, shape, dtype):
        if np.prod(shape, dtype=np.int64) * np.dtype(dtype).itemsize > TOTAL_BYTES:
            raise CapacityError(f"no memory for shape {shape}")
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)  # NaN, and no sensible length
        return array

    def write(self, target, source) -> None:
        target[:] = source

    def download(self, array, out=None):
        if out is None:
            return array.copy()
        out[...] = array
        return out

    def pinned(self, shape, dtype):
        return np.zeros(shape, dtype)

    def event(self):
        return object()

    def record(self, event) -> None:
        pass

    def wait(self, event) -> None:
        self.waits += 1

    def seconds_between(self, begin, end) -> float:
        return 1e-3

    def synchronize(self) -> None:
        self.synchronizations += 1

    def rare_run_options(self):
        return None

    def trim(self) -> None:
        self.trims += 1

    def memory(self):
        return TOTAL_BYTES, TOTAL_BYTES

    def bind_input(self, binding, name, array) -> None:
        binding.bind_ortvalue_input(name, wrap(array))

    def bind_output(self, binding, name, array) -> None:
        binding.bind_ortvalue_output(name, wrap(array))

    def bind_in_place(self, binding, name, array) -> None:
        value = wrap(array)
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(contract.output(name), value)


class FakeChooser:
    """Chooses as the kernels do, with NumPy's random numbers."""

    def __init__(self, device, logits, state) -> None:
        self._logits, self._state = logits, state
        self.bytes = 0

    def start(self, sampling: Sequence[Sampling], histories: Sequence[Sequence[int]]) -> None:
        self._options, self._seen = sampling[0], set(histories[0])

    def check(self, produced) -> None:
        produced[0] = int(np.argmax(self._logits[0])) if np.isfinite(self._logits[0]).all() else -1

    def choose(self, produced, draw: int, advance_tokens: int) -> None:
        state = self._state
        produced[0] = self._choose(draw) if np.isfinite(self._logits[0]).all() else -1
        self._seen.add(int(produced[0]))
        state.token_ids[0] = max(0, produced[0])
        for lengths in (state.positions, state.past_len, state.kv_len):
            lengths += advance_tokens

    def _choose(self, draw: int) -> int:
        logits = self._logits[0]
        if self._options.repetition_penalty != 1.0:
            logits = penalize(logits, sorted(self._seen), self._options.repetition_penalty)
        if self._options.temperature == 0.0:
            return int(np.argmax(logits))
        probabilities = distribution(logits, self._options)
        return int(np.random.default_rng([self._options.seed, draw]).choice(len(probabilities), p=probabilities))


def make_session(
    model: ortolan.Model,
    monkeypatch: pytest.MonkeyPatch,
    *,
    max_context: int | None = None,
    chunk_size: int | None = None,
    snapkv: SnapKv | None = None,
) -> DeviceSession:
    """Make a device session of a model that was loaded for the CPU."""
    monkeypatch.setattr(device_session, "TokenChooser", FakeChooser)
    budget = snapkv.budget if snapkv and snapkv.during_prefill else None
    plan = plan_caches(model.manifest, max_context, chunk_size, cuda=True, budget=budget)
    evict_session = model._evict_session(snapkv) if snapkv else None
    shared = DeviceModel(FakeCuda(), itertools.count(1), TOTAL_BYTES, 0)
    return DeviceSession(model.manifest, model._session, plan, snapkv, evict_session, shared)
