"""What the layouts of published weights share: a reader's interface, packed integers, and checks of their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from ortolan.errors import CheckpointError
from ortolan.export.checkpoint import Array, Checkpoint
from ortolan.export.families.base import Source
from ortolan.graphs.formats.low_bit import LowBit


class Layout(Protocol):
    """How one `quant_method` stores a linear weight [N, K]."""

    @property
    def marker(self) -> str:
        """Ending of the tensor that tells a quantized linear layer from a dense one."""

    @property
    def idle(self) -> tuple[str, ...]:
        """Endings of tensors that may be there and are not needed to read weights."""

    def holds(self, checkpoint: Checkpoint, stem: str) -> bool:
        """Say whether a linear layer is quantized."""

    def describe(self, tensors: Tensors, shape: tuple[int, ...]) -> tuple[LowBit, set[str]]:
        """Return a weight's format, and the endings of the tensors that hold it.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
            UnsupportedModelError: the layout has an option that is not supported.
        """

    def read(self, tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Array]:
        """Return arrays by port of LowBitLinear."""


class ExpertLayout(Protocol):
    """How one `quant_method` stores a weight [E, rows, columns] of a mixture."""

    def holds(self, checkpoint: Checkpoint, source: Source) -> bool:
        """Say whether experts are quantized."""

    def describe(self, checkpoint: Checkpoint, source: Source, shape: tuple[int, ...]) -> tuple[LowBit, set[str]]:
        """Return the weight's format, and the names of the tensors that hold it. Raises as `Layout.describe` does."""

    def pieces(
        self, checkpoint: Checkpoint, source: Source, shape: tuple[int, ...], stored: LowBit
    ) -> Iterator[dict[str, Array]]:
        """Yield consecutive rows in the mixture's format, arrays by port of LowBitLinear."""


class Tensors:
    """The tensors of one linear layer, by their endings."""

    def __init__(self, checkpoint: Checkpoint, stem: str) -> None:
        self.stem = stem
        self._checkpoint = checkpoint

    def has(self, ending: str) -> bool:
        """Say whether there is a tensor."""
        return self.stem + ending in self._checkpoint.entries

    def shape(self, ending: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises CheckpointError."""
        entry = self._checkpoint.entries.get(self.stem + ending)
        if entry is None:
            raise CheckpointError(f"the checkpoint lacks the tensor {self.stem}{ending}")
        return entry.shape

    def element(self, ending: str) -> str:
        """Return a tensor's type as safetensors names it."""
        self.shape(ending)
        return self._checkpoint.entries[self.stem + ending].element_type

    def expect(self, allowed: Mapping[str, tuple[int, ...]]) -> None:
        """Check shapes by ending. Raises CheckpointError."""
        for ending, shape in allowed.items():
            if self.shape(ending) != shape:
                raise CheckpointError(
                    f"{self.stem}{ending} has shape {list(self.shape(ending))}, expected {list(shape)}"
                )

    def read(self, ending: str) -> Array:
        """Map a tensor. Raises CheckpointError."""
        self.shape(ending)
        return self._checkpoint.read(self.stem + ending)

    def scales(self, ending: str) -> Array:
        """Read scales as float32, checked: each must be finite and not 0. Raises CheckpointError."""
        values = self.read(ending).astype(np.float32)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.stem}{ending} has scales that are not finite; the checkpoint is damaged")
        if (values == 0).any():
            raise CheckpointError(f"{self.stem}{ending} has scales that are 0; the checkpoint is damaged")
        return values


def unpack_words(words: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Return the integers of int32 words along a new last axis, [...] -> [..., 32 / bits] uint8.

    Args:
        words: int32 of any shape.
        bits: of an integer; the lowest bits hold the first one.
        order: the place in a word of each integer; None: as they come.
    """
    places = np.arange(32 // bits) if order is None else np.array(order)
    shifts = (places * bits).astype(np.uint32)
    values = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts
    return np.asarray(values & np.uint32((1 << bits) - 1), np.uint8)


def group_size(columns: int, groups: int, stem: str) -> int:
    """Return the size of groups that divide the columns; 0 for one group. Raises CheckpointError."""
    if groups < 1 or columns % groups:
        raise CheckpointError(f"{stem}: {groups} groups of scales do not divide {columns} input features")
    return 0 if groups == 1 else columns // groups
