"""The experts of gpt-oss as published: mxfp4, all of a layer's in one tensor of blocks and one of scales.

Source: openai/gpt-oss-20b and transformers' integrations/mxfp4.py. `..._blocks` [E, rows, columns / 32, 16] holds two
e2m1 codes in a byte, the first in its low half; `..._scales` [E, rows, columns / 32] holds exponents with a bias of
127. The codes are kept as they are; rows of gate and factor, which alternate, are put apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ortolan.errors import CheckpointError
from ortolan.export.checkpoint import Array, Checkpoint
from ortolan.export.families.base import Source
from ortolan.export.packed.layouts import Tensors
from ortolan.graphs.formats.low_bit import LowBit
from ortolan.graphs.formats.plan import MXFP4_GROUP

BLOCKS, SCALES = "_blocks", "_scales"
NOT_A_NUMBER = 255  # of e8m0


class BlockExperts:
    """Weights of experts in blocks of 32."""

    def holds(self, checkpoint: Checkpoint, source: Source) -> bool:
        """Say whether experts are quantized."""
        return source.name + BLOCKS in checkpoint.entries

    def describe(self, checkpoint: Checkpoint, source: Source, shape: tuple[int, ...]) -> tuple[LowBit, set[str]]:
        """Return the format, and the names of the tensors."""
        tensors, (*stack, columns) = Tensors(checkpoint, source.name), shape
        if columns % MXFP4_GROUP:
            raise CheckpointError(
                f"{source.name}{BLOCKS}: blocks of {MXFP4_GROUP} do not divide {columns} input features"
            )
        groups = (*stack, columns // MXFP4_GROUP)
        tensors.expect({BLOCKS: (*groups, MXFP4_GROUP // 2), SCALES: groups})
        for ending in (BLOCKS, SCALES):
            if tensors.element(ending) != "U8":
                raise CheckpointError(f"{source.name}{ending} is {tensors.element(ending)}, expected U8")
        if (tensors.read(SCALES) == NOT_A_NUMBER).any():
            raise CheckpointError(f"{source.name}{SCALES} has scales that are not finite; the checkpoint is damaged")
        return LowBit(kind="mxfp4", group_size=MXFP4_GROUP), {source.name + BLOCKS, source.name + SCALES}

    def pieces(
        self, checkpoint: Checkpoint, source: Source, shape: tuple[int, ...], stored: LowBit
    ) -> Iterator[dict[str, Array]]:
        """Yield one expert after another, arrays by port of LowBitLinear."""
        tensors = Tensors(checkpoint, source.name)
        blocks, scales = tensors.read(BLOCKS), tensors.read(SCALES)
        for codes, scale_codes in zip(blocks, scales, strict=True):
            yield {
                "codes": _apart(codes.reshape(len(codes), -1), source),
                "scale_codes": _apart(scale_codes, source),
            }


def _apart(rows: Array, source: Source) -> Array:
    """Put the rows of the gate, which alternate with those of the factor, before them."""
    return np.concatenate([rows[::2], rows[1::2]]) if source.alternating else np.ascontiguousarray(rows)
