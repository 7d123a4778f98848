"""Checks token ids, and lays the inputs of steps out in one block of memory, so that one copy brings them over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan import contract
from ortolan.errors import ConfigError
from ortolan.manifest import Manifest
from ortolan.runtime.buffers import Array

ALIGNMENT = 256  # bytes, of each input
Lengths = dict[int, npt.NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Field:
    """One input's place in the block."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    def view(self, block: Array) -> Array:
        """View the input in a block of bytes, on the host or the device."""
        size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return block[self.offset : self.offset + size].view(self.dtype).reshape(self.shape)


def check_token_ids(token_ids: Sequence[int] | npt.NDArray[Any], vocab_size: int) -> npt.NDArray[np.int64]:
    """Return token ids as int64 [T].

    Raises:
        ConfigError: no list of integers, an empty one, or an id outside the vocabulary.
    """
    try:
        given = np.asarray(token_ids)
    except ValueError as error:
        raise ConfigError(f"token_ids are no list of integers: {error}") from error
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
        raise ConfigError(
            f"token_ids has shape {list(given.shape)} and type {given.dtype}; "
            "expected at least one integer in one dimension"
        )
    if given.min() < 0 or given.max() >= vocab_size:
        raise ConfigError(f"token ids {int(given.min())} .. {int(given.max())} must lie in 0 .. {vocab_size - 1}")
    return given.astype(np.int64)


class StepLayout:
    """Places the inputs of `steps` steps that share `tokens` tokens of one sequence.

    token_ids, positions and rope_variant are [tokens]; each step has its own query_start, past_len and kv_len. The
    kv_len of all evictable layers lie behind one another, so that a kernel can advance them together.
    """

    def __init__(self, manifest: Manifest, tokens: int, steps: int) -> None:
        self._bytes = 0
        self._heads = {i: layer.num_kv_heads for i, layer in enumerate(manifest.layers) if layer.evictable}
        self.token_ids = self._place((tokens,), "int64")
        self.positions = self._place((tokens,), "int64")
        self.rope_variant = self._place((tokens,), "int64")
        self.query_start = [self._place((2,), "int32") for _ in range(steps)]
        self.past_len = [self._place((1,), "int32") for _ in range(steps)]
        self.kv_len = [self._place((sum(self._heads.values()),), "int32") for _ in range(steps)]

    @property
    def bytes(self) -> int:
        """Bytes of the block."""
        return self._bytes

    def fill(
        self,
        block: npt.NDArray[np.uint8],
        tokens: npt.NDArray[np.int64],
        steps: list[tuple[int, int]],
        lengths: tuple[int, Lengths],
        variant: int,
    ) -> None:
        """Write inputs to a host block.

        Args:
            block: of `bytes` bytes.
            tokens: [tokens].
            steps: half-open ranges of tokens, one per step.
            lengths: logical length before the first step, and physical lengths per kv head of evictable layers.
            variant: of RoPE.
        """
        logical, physical = lengths
        self.token_ids.view(block)[:] = tokens
        self.positions.view(block)[:] = np.arange(logical, logical + len(tokens))
        self.rope_variant.view(block)[:] = variant
        held = np.concatenate([physical[i] for i in self._heads]) if self._heads else np.zeros(0, np.int32)
        for step, (begin, end) in enumerate(steps):
            self.query_start[step].view(block)[:] = (0, end - begin)
            self.past_len[step].view(block)[:] = logical + begin
            self.kv_len[step].view(block)[:] = held + begin

    def named(self, block: Array, step: int, begin: int, end: int) -> dict[str, Array]:
        """Map graph input names to the inputs of one step in a device block."""
        inputs = {
            contract.TOKEN_IDS: self.token_ids.view(block)[begin:end],
            contract.POSITIONS: self.positions.view(block)[begin:end],
            contract.ROPE_VARIANT: self.rope_variant.view(block)[begin:end],
            contract.QUERY_START: self.query_start[step].view(block),
            contract.PAST_LEN: self.past_len[step].view(block),
        }
        lengths, first = self.kv_len[step].view(block), 0
        for index, heads in self._heads.items():
            inputs[contract.kv_len(index)] = lengths[first : first + heads].reshape(1, heads)
            first += heads
        return inputs

    def _place(self, shape: tuple[int, ...], dtype: str) -> Field:
        field = Field(self._bytes, shape, dtype)
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self._bytes += -(-size // ALIGNMENT) * ALIGNMENT
        return field
