"""Chooses tokens on a CUDA device and moves the state of a decode step on, as `sampler` does on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ortolan.runtime.device.buffers import Array
from ortolan.runtime.device.cuda import CudaBuffers
from ortolan.runtime.generate import device_library
from ortolan.runtime.generate.device_logprobs import DeviceLogprobs, Words
from ortolan.runtime.generate.draw import Draw
from ortolan.runtime.generate.logprobs import MAX_LOGPROBS


class DecodeState(Protocol):
    """The device arrays of a decode step that a choice writes."""

    token_ids: Array  # [R] int64
    positions: Array  # [R] int64
    past_len: Array  # [R] int32
    kv_len: Array  # [all layers' R * Hkv] int32


class DeviceSampler:
    """Chooses the next token of each sequence from logits on the device.

    Every call only enqueues; what arrives in pinned memory is valid once an event recorded after it has passed. Each
    choice adds 1 to the positions that the draws depend on, so a chain of decode steps needs `start` once.
    """

    def __init__(self, device: CudaBuffers, logits: Array, state: DecodeState | None = None) -> None:
        """Choose from logits [R, V] at a fixed address, for the rows of a state, or for none.

        Raises:
            OpLibraryError: the operator library was built without CUDA, or does not match this version.
            CapacityError: the device has no memory.
        """
        self._device, self._logits, self._state = device, logits, state
        self._library = device_library.open_library()
        rows, vocab_size = logits.shape
        self._workspace = device.upload(np.zeros(self._library.ortolan_cuda_decode_workspace(rows), np.uint8))
        self._logprobs: DeviceLogprobs | None = None
        self._rules: Array = None
        self._seen: Array = None
        self._choice = device_library.DecodeAdvance(
            device=device.device_id,
            logits=logits.data.ptr,
            num_sequences=rows,
            vocab_size=vocab_size,
            workspace=self._workspace.data.ptr,
            stream=device.stream_pointer,
        )

    @property
    def bytes(self) -> int:
        """Device memory that choosing takes."""
        arrays = sum(int(array.nbytes) for array in (self._workspace, self._rules, self._seen) if array is not None)
        return arrays + (self._logprobs.bytes if self._logprobs else 0)

    def start(self, draws: Sequence[Draw | None]) -> None:
        """Take the draws of the next choice, one per row; later choices follow from it.

        None takes the most likely token. Tokens chosen from now on count as seen by themselves.
        """
        self._rules = self._device.upload(pack_rules(draws).view(np.uint8))
        self._seen = None
        if any(draw is not None and draw.has_penalty for draw in draws):
            self._seen = self._device.upload(mark_seen(draws, self._logits.shape[1]))
        self._choice.rules = self._rules.data.ptr
        self._choice.seen = 0 if self._seen is None else self._seen.data.ptr
        self._choice.random = any(draw is not None and draw.is_random for draw in draws)
        if self._state is not None:
            self._choice.token_ids = self._state.token_ids.data.ptr
            self._choice.positions = self._state.positions.data.ptr
            self._choice.past_len = self._state.past_len.data.ptr
            self._choice.kv_len = self._state.kv_len.data.ptr
            self._choice.num_kv_lens = self._state.kv_len.size

    def choose(self, produced: npt.NDArray[np.int32], advance_tokens: int, logprobs: Words | None = None) -> None:
        """Enqueue the choice of each row's next token, which also becomes the state's token id.

        Args:
            produced: [R] int32, pinned; `BAD` arrives where logits contain NaN or infinity.
            advance_tokens: added to the state's positions and lengths: 1 after a step, 0 after a prefill.
            logprobs: as `logprob_results` allocates them; None: none are wanted. Read them by `read_logprobs`.

        Raises:
            OrtolanError: a kernel cannot be launched.
        """
        self._choice.produced = produced.ctypes.data
        self._choice.advance_tokens = advance_tokens
        device_library.call(self._library, self._library.ortolan_cuda_decode_advance, self._choice)
        if logprobs is not None:
            self._scorer().enqueue(self._logits.data.ptr, produced.ctypes.data, logprobs)

    def logprob_results(self, k: int) -> Words:
        """Allocate pinned memory for the log-probabilities of one choice and of each row's k best tokens."""
        return self._scorer().results(self._logits.shape[0], k)

    def score(self, tokens: npt.NDArray[np.int32], k: int) -> Words:
        """Enqueue the log-probabilities of given tokens [n], pinned, and of the k best of each of the first n rows."""
        results = self._scorer().results(len(tokens), k)
        self._scorer().enqueue(self._logits.data.ptr, tokens.ctypes.data, results)
        return results

    def _scorer(self) -> DeviceLogprobs:
        if self._logprobs is None:
            rows, vocab_size = self._logits.shape
            self._logprobs = DeviceLogprobs(self._device, rows, vocab_size, min(MAX_LOGPROBS, vocab_size))
        return self._logprobs


def pack_rules(draws: Sequence[Draw | None]) -> npt.NDArray[Any]:
    """Lay draws out as the kernel reads them, [R] of SAMPLING_RULE."""
    rules = np.zeros(len(draws), device_library.SAMPLING_RULE)
    rules["inverse_temperature"], rules["repetition_penalty"] = np.inf, 1.0
    for rule, draw in zip(rules, draws, strict=True):
        if draw is not None:
            options = draw.sampling
            rule["tail_mass"] = 1.0 - options.top_p
            rule["seed"], rule["draw"] = draw.seed % 2**64, draw.position
            rule["inverse_temperature"] = draw.inverse_temperature
            rule["min_p"] = options.min_p
            rule["repetition_penalty"] = options.repetition_penalty
            rule["top_k"] = min(options.top_k, 2**31 - 1)
    return rules


def mark_seen(draws: Sequence[Draw | None], vocab_size: int) -> npt.NDArray[np.uint8]:
    """Mark the tokens that each row's sequence contains, [R, V]; only where the row has a penalty."""
    seen = np.zeros((len(draws), vocab_size), np.uint8)
    for row, draw in zip(seen, draws, strict=True):
        if draw is not None and draw.has_penalty:
            row[np.asarray(draw.seen, np.int64)] = 1
    return seen
