"""Chooses tokens on the device and moves the decode state on, through the operator library's plain C functions."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ortolan.custom_ops import library_path
from ortolan.errors import OpLibraryError, OrtolanError
from ortolan.runtime.buffers import Array
from ortolan.runtime.cuda import CudaBuffers
from ortolan.runtime.options import Sampling

MIN_TEMPERATURE = 1e-20  # below it, as above 0, only the best token has any probability left
RULE = np.dtype(  # as cuda::SamplingRule
    [
        ("tail_mass", np.float64),
        ("seed", np.uint64),
        ("inverse_temperature", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("top_k", np.int32),
    ]
)


class DecodeAdvance(ctypes.Structure):
    """One call of ortolan_cuda_decode_advance; fields of 8 bytes each, addresses and counts."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "device",
            "logits",
            "rules",
            "seen",
            "num_sequences",
            "vocab_size",
            "draw",
            "random",
            "produced",
            "token_ids",
            "positions",
            "past_len",
            "kv_len",
            "num_kv_lens",
            "advance_tokens",
            "workspace",
            "stream",
        )
    )


class DecodeState(Protocol):
    """The device arrays of a decode step that a choice writes."""

    token_ids: Array  # [B] int64
    positions: Array  # [B] int64
    past_len: Array  # [B] int32
    kv_len: Array  # [all layers' B * Hkv] int32


class TokenChooser:
    """Chooses the next token of each sequence from logits on the device.

    Every call only enqueues; `produced` is valid once an event recorded after it has passed.
    """

    def __init__(self, device: CudaBuffers, logits: Array, state: DecodeState) -> None:
        self._device, self._logits, self._state = device, logits, state
        self._library = _open_library()
        batch, vocabulary = logits.shape
        self._workspace = device.upload(np.zeros(self._library.ortolan_cuda_decode_workspace(batch), np.uint8))
        self._rules: Array = None
        self._seen: Array = None
        self._check = DecodeAdvance(
            device=device.device_id,
            logits=logits.data.ptr,
            num_sequences=batch,
            vocab_size=vocabulary,
            workspace=self._workspace.data.ptr,
            stream=device.stream_pointer,
        )
        self._choice = DecodeAdvance()

    @property
    def bytes(self) -> int:
        """Device memory that choosing takes."""
        return sum(int(array.nbytes) for array in (self._workspace, self._rules, self._seen) if array is not None)

    def start(self, sampling: Sequence[Sampling], histories: Sequence[Sequence[int]]) -> None:
        """Take the rules of the choices to come, and the tokens that each sequence holds, one entry per sequence."""
        self._rules = self._device.upload(pack_rules(sampling).view(np.uint8))
        self._seen = None
        if any(options.repetition_penalty != 1.0 for options in sampling):
            self._seen = self._device.upload(mark_seen(histories, self._logits.shape[1]))
        state = self._state
        ctypes.memmove(ctypes.byref(self._choice), ctypes.byref(self._check), ctypes.sizeof(DecodeAdvance))
        self._choice.rules = self._rules.data.ptr
        self._choice.seen = 0 if self._seen is None else self._seen.data.ptr
        self._choice.random = any(options.temperature > 0 for options in sampling)
        self._choice.token_ids = state.token_ids.data.ptr
        self._choice.positions = state.positions.data.ptr
        self._choice.past_len = state.past_len.data.ptr
        self._choice.kv_len = state.kv_len.data.ptr
        self._choice.num_kv_lens = state.kv_len.size

    def reseed(self, rules: npt.NDArray[Any]) -> None:
        """Overwrite the rules [B] of the choices to come; what `start` was told of histories goes on."""
        self._device.write(self._rules, rules.view(np.uint8))

    def choose(self, produced: npt.NDArray[np.int32], draw: int, advance_tokens: int) -> None:
        """Write the next token ids to the state and to `produced` [B], pinned; -1 where logits are no numbers.

        Args:
            produced: pinned host memory.
            draw: counter of the random numbers; equal seeds and counters draw equally.
            advance_tokens: added to the state's positions and lengths: 1 after a step, 0 after a prefill.
        """
        self._choice.produced = produced.ctypes.data
        self._choice.draw = draw
        self._choice.advance_tokens = advance_tokens
        self._call(self._choice)

    def check(self, produced: npt.NDArray[np.int32]) -> None:
        """Write -1 to `produced` [B], pinned, where the logits are no numbers; else the most likely token."""
        self._check.produced = produced.ctypes.data
        self._call(self._check)

    def _call(self, step: DecodeAdvance) -> None:
        code = self._library.ortolan_cuda_decode_advance(ctypes.byref(step))
        if code:
            text = self._library.ortolan_cuda_error_text(code).decode()
            raise OrtolanError(f"choosing a token failed on cuda:{self._device.device_id}: {text}")


def pack_rules(sampling: Sequence[Sampling]) -> npt.NDArray[Any]:
    """Lay sampling options out as the kernel reads them, [B] of RULE; a seed of None draws a fresh one."""
    rules = np.zeros(len(sampling), RULE)
    for rule, options in zip(rules, sampling, strict=True):
        seed = secrets.randbits(64) if options.seed is None else options.seed
        temperature = max(options.temperature, MIN_TEMPERATURE)
        rule["tail_mass"] = 1.0 - options.top_p
        rule["seed"] = seed % 2**64
        rule["inverse_temperature"] = 1.0 / temperature if options.temperature > 0 else np.inf
        rule["min_p"] = options.min_p
        rule["repetition_penalty"] = options.repetition_penalty
        rule["top_k"] = min(options.top_k, 2**31 - 1)
    return rules


def mark_seen(histories: Sequence[Sequence[int]], vocab_size: int) -> npt.NDArray[np.uint8]:
    """Mark the tokens that each sequence holds, [B, V]."""
    seen = np.zeros((len(histories), vocab_size), np.uint8)
    for row, history in zip(seen, histories, strict=True):
        row[np.asarray(history, np.int64)] = 1
    return seen


def _open_library() -> Any:
    library = ctypes.CDLL(str(library_path()))
    try:
        library.ortolan_cuda_decode_advance.restype = ctypes.c_int
        library.ortolan_cuda_decode_advance.argtypes = [ctypes.c_void_p]
        library.ortolan_cuda_decode_workspace.restype = ctypes.c_int64
        library.ortolan_cuda_decode_workspace.argtypes = [ctypes.c_int64]
        library.ortolan_cuda_error_text.restype = ctypes.c_char_p
    except AttributeError as error:
        raise OpLibraryError(
            f"{library_path()} has no CUDA decode functions ({error}); build it with a CUDA compiler, or use "
            "device='cpu'"
        ) from error
    return library
