"""Experts that are published one by one, each as linear layers of some layout: read into one format for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ortolan.errors import UnsupportedModelError
from ortolan.export.checkpoint import Array, Checkpoint
from ortolan.export.families.base import Source
from ortolan.export.packed.layouts import Layout, Tensors
from ortolan.graphs.formats.low_bit import LowBit


class ExpertLayers:
    """Weights of experts that are linear layers; gate and up may lie apart."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def holds(self, checkpoint: Checkpoint, source: Source) -> bool:
        """Say whether experts are quantized; one that is answers for all."""
        return any(self._layout.holds(checkpoint, stem) for stem in _stems(source))

    def describe(self, checkpoint: Checkpoint, source: Source, shape: tuple[int, ...]) -> tuple[LowBit, set[str]]:
        """Return the format that all experts' layers can have, and the names of their tensors."""
        rows, columns = _layer_shape(source, shape)
        found, names = [], set()
        for stem in _stems(source):
            stored, endings = self._layout.describe(Tensors(checkpoint, stem), (rows, columns))
            found.append(stored)
            names |= {stem + ending for ending in (*endings, *self._layout.idle)}
        stored = common_format(found, [columns] * len(found), source.name)
        if rows % stored.scale_rows and rows < shape[1]:
            raise UnsupportedModelError(f"{source.name}: a block of scales would hold rows of a gate and of its factor")
        return stored, names

    def pieces(
        self, checkpoint: Checkpoint, source: Source, shape: tuple[int, ...], stored: LowBit
    ) -> Iterator[dict[str, Array]]:
        """Yield one expert after another, arrays by port of LowBitLinear."""
        layer, stems = _layer_shape(source, shape), _stems(source)
        each = len(stems) // shape[0]
        for begin in range(0, len(stems), each):
            parts = [self._read(checkpoint, stem, layer, stored) for stem in stems[begin : begin + each]]
            yield {port: np.concatenate([part[port] for part in parts]) for port in parts[0]}

    def _read(self, checkpoint: Checkpoint, stem: str, shape: tuple[int, int], stored: LowBit) -> dict[str, Array]:
        """Read a layer; where others have zero points, it has those in the middle."""
        arrays = self._layout.read(Tensors(checkpoint, stem), shape)
        if stored.zero_points and "zero_points" not in arrays:
            middle = 0x88 if stored.bits == 4 else 0x80
            width = -(-stored.groups(shape[1]) * stored.bits // 8)
            arrays["zero_points"] = np.full((shape[0], width), middle, np.uint8)
        return arrays


def common_format(found: Sequence[LowBit], columns: Sequence[int], name: str) -> LowBit:
    """Return the one format in which weights of these formats and columns can be stored without a change of value.

    Raises:
        UnsupportedModelError: there is none.
    """
    kinds = {stored.kind for stored in found}
    blocks = {stored.scale_rows for stored in found}
    sizes = {stored.group_size for stored in found}
    if len(sizes) > 1:  # a whole row may be a group of the size that others have
        sizes = {stored.group_size or width for stored, width in zip(found, columns, strict=True)}
    if max(len(kinds), len(blocks), len(sizes)) > 1:
        raise UnsupportedModelError(
            f"{name}: the experts of this mixture are stored in different ways ({', '.join(sorted(kinds))}; groups of "
            f"{', '.join(map(str, sorted(sizes)))}); supported: one for all"
        )
    return LowBit(
        kind=kinds.pop(),
        group_size=sizes.pop(),
        zero_points=any(stored.zero_points for stored in found),
        scale_rows=blocks.pop(),
    )


def _stems(source: Source) -> list[str]:
    return [part.removesuffix(".weight") for part in source.parts]


def _layer_shape(source: Source, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of each of a source's layers; an expert has one or two of them."""
    return shape[0] * shape[1] // len(source.parts), shape[2]
