"""A CUDA device made of NumPy arrays: what a stepper enqueues happens at once, on the CPU provider."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import ortolan
from ortolan import contract
from ortolan.errors import CapacityError
from ortolan.policies import Eviction
from ortolan.runtime.device.buffers import wrap
from ortolan.runtime.device.cuda import CudaBuffers
from ortolan.runtime.device.memory import DeviceMemory
from ortolan.runtime.device.opening import Device
from ortolan.runtime.device.providers import CPU_PROVIDER
from ortolan.runtime.generate.draw import BAD, Draw
from ortolan.runtime.generate.logprobs import top_logprobs
from ortolan.runtime.generate.sampler import choose
from ortolan.runtime.session import Session
from ortolan.runtime.steps import bucket

TOTAL_BYTES = 2**30


class FakeCuda(CudaBuffers):
    """Counts what it holds, and refuses more than `TOTAL_BYTES`."""

    def __init__(self) -> None:
        self.device_id = 0
        self.trims = 0

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
            raise CapacityError(f"cannot allocate shape {shape}")
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
        pass

    def seconds_between(self, begin, end) -> float:
        return 1e-3

    def synchronize(self) -> None:
        pass

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


class FakeSampler:
    """Chooses as the kernels do, by the host's sampler."""

    def __init__(self, device, logits, state) -> None:
        self._logits, self._state = logits, state
        self.bytes = 0

    def start(self, draws: Sequence[Draw | None]) -> None:
        self._draws = [draw and dataclasses.replace(draw, seen=list(draw.seen)) for draw in draws]

    def choose(self, produced, advance_tokens: int, logprobs=None) -> None:
        state = self._state
        produced[:] = choose(self._logits, self._draws)
        for row, draw in enumerate(self._draws):
            if draw is None and produced[row] != BAD:  # as the device, which takes the most likely token then
                produced[row] = int(np.argmax(self._logits[row]))
            elif draw is not None:
                seen = [*draw.seen, int(produced[row])]
                self._draws[row] = dataclasses.replace(draw, position=draw.position + 1, seen=seen)
        state.token_ids[:] = np.maximum(produced, 0)
        for lengths in (state.positions, state.past_len, state.kv_len):
            lengths += advance_tokens
        if logprobs is not None:
            self._fill(logprobs, produced)

    def logprob_results(self, k: int):
        return np.zeros((len(self._logits), 2 + 2 * k), np.int32)

    def score(self, tokens, k: int):
        assert len(tokens), "a kernel without blocks cannot be launched"
        words = np.zeros((len(tokens), 2 + 2 * k), np.int32)
        self._fill(words, tokens)
        return words

    def _fill(self, words, tokens) -> None:
        k = words.shape[1] // 2 - 1
        for row, token in enumerate(tokens):
            if not np.isfinite(self._logits[row]).all():
                continue
            (scored,) = top_logprobs(self._logits[row : row + 1], [int(token)], k)
            words[row, 1 : 2 + k].view(np.float32)[:] = [scored.logprob, *(value for _, value in scored.top)]
            words[row, 2 + k :] = [best for best, _ in scored.top]


def on_fake_cuda(model: ortolan.Model, monkeypatch: pytest.MonkeyPatch) -> ortolan.Model:
    """Return a model that was loaded for the CPU as one whose sessions and engines believe in a CUDA device."""
    monkeypatch.setattr(bucket, "DeviceSampler", FakeSampler)
    fake = copy.copy(model)
    fake.device = Device(provider=CPU_PROVIDER, num_threads=1, cuda=FakeCuda())
    fake.memory = DeviceMemory(fake.device, model.manifest)
    monkeypatch.setattr(DeviceMemory, "scratch_bytes", lambda *_: 0)  # the library may be built without CUDA
    fake.decoder = dataclasses.replace(model.decoder, graph_ids=itertools.count(1))
    return fake


def make_session(
    model: ortolan.Model,
    monkeypatch: pytest.MonkeyPatch,
    *,
    max_context: int | None = None,
    chunk_size: int | None = None,
    snapkv: Eviction | None = None,
) -> Session:
    """Make a session on a fake device, of a model that was loaded for the CPU."""
    return on_fake_cuda(model, monkeypatch).session(max_context, chunk_size, snapkv)
