"""Computes log-probabilities of rows of logits on a CUDA device; see `ortolan.runtime.generate.logprobs`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ortolan.runtime.buffers import Array
from ortolan.runtime.cuda import CudaBuffers
from ortolan.runtime.generate import device_library
from ortolan.runtime.generate.logprobs import TokenLogprobs

Words = npt.NDArray[np.int32]  # [R, 2 + 2k]: float32 log-sum-exp, the token's, the k best; their ids


class DeviceLogprobs:
    """Enqueues the computation for up to `rows` rows; results arrive in pinned host memory."""

    def __init__(self, device: CudaBuffers, rows: int, vocab_size: int, k: int) -> None:
        """Allocate what at most `k` best tokens per row take. Raises CapacityError."""
        self._library = device_library.open_library()
        self._device, self._vocab_size = device, vocab_size
        size = self._library.ortolan_cuda_logprobs_workspace(rows, vocab_size, k)
        self._workspace: Array = device.allocate((size,), np.uint8)

    @property
    def bytes(self) -> int:
        """Device memory that this takes."""
        return int(self._workspace.nbytes)

    def results(self, rows: int, k: int) -> Words:
        """Allocate pinned memory for the log-probabilities of each row's token and its k best tokens."""
        return self._device.pinned((rows, 2 + 2 * min(k, self._vocab_size)), np.int32)

    def enqueue(self, logits_address: int, tokens_address: int, results: Words) -> None:
        """Enqueue the computation; `results` are valid once an event recorded after it has passed.

        Args:
            logits_address: of logits [R, V] float32 on the device.
            tokens_address: of R int32 token ids, on the device or in pinned memory.
            results: as `results` allocates them, for at most the rows and the k given at first.

        Raises:
            OrtolanError: a kernel cannot be launched.
        """
        rows, words = results.shape
        call = device_library.TopLogprobs(
            device=self._device.device_id,
            logits=logits_address,
            tokens=tokens_address,
            num_rows=rows,
            vocab_size=self._vocab_size,
            k=words // 2 - 1,
            results=results.ctypes.data,
            workspace=self._workspace.data.ptr,
            stream=self._device.stream_pointer,
        )
        device_library.call(self._library, self._library.ortolan_cuda_top_logprobs, call)


def read_logprobs(results: Words, tokens: Sequence[int], counts: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """Return what arrived for the first rows.

    Args:
        results: [R, 2 + 2k].
        tokens: the token of each row, as many as are read.
        counts: how many best tokens each row wants; None: no log-probabilities.
    """
    k = results.shape[1] // 2 - 1
    values = results[:, : 2 + k].view(np.float32)
    return [
        None if count is None else _of_row(token, values[row, 1:].tolist(), results[row, 2 + k :].tolist(), count)
        for row, (token, count) in enumerate(zip(tokens, counts, strict=True))
    ]


def _of_row(token: int, logprobs: list[float], best: list[int], count: int) -> TokenLogprobs:
    return TokenLogprobs(token, logprobs[0], tuple(zip(best, logprobs[1:], strict=True))[:count])
