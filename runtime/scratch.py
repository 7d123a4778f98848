"""Bounds the scratch memory of CUDA's decode attention, which grows with the sequences of a step and their capacity.

Source: csrc/kernels/cuda/decode_plan.cuh and decode_launch.cuh, whose numbers these are.
"""

from __future__ import annotations

import math

from ortolan.manifest import LayerInfo, Manifest
from ortolan.runtime.engine_plan import EnginePlan
from ortolan.runtime.plan import ELEMENT_BYTES

HEAD_SIZES = (64, 128, 256, 512)  # that kernels are compiled for
DECODE_TOKENS = 16  # a sequence with more new tokens in a step belongs to prefill
ENTRY_ROWS = 16  # query rows that one pass over the keys serves, at most
SPAN_TILES = 8  # tiles of keys that are merged before they are set down
SPARE_SPANS = 5  # of an entry: its first and last tiles may be cut by the window, by sinks and by the capacity
GOOD_STAGES = 3  # tiles that a block's shared memory holds, if it can
OTHER_SHARED_BYTES = 4096


def decode_scratch_bytes(manifest: Manifest, plan: EnginePlan, shared_bytes: int) -> int:
    """Return the bytes of the partial sums that a step of an engine sets down, at most, one layer after another.

    What does not grow, about 10 MB, is left out.

    Args:
        manifest: of the model.
        plan: of the engine.
        shared_bytes: shared memory that a block of the device may have.
    """
    if manifest.dtype == "float32":
        return 0  # its kernel takes each row in one piece
    tokens = max(plan.chunk_tokens, plan.max_sequences)
    most = 0
    for kind, planned in zip(manifest.cache_kinds, plan.kinds, strict=True):
        for layer in (manifest.layers[index] for index in kind.layers):
            rows = decode_rows(plan.max_sequences, tokens, layer.num_heads // layer.num_kv_heads)
            spans = planned.table_pages * planned.page_size // tile_keys(layer, shared_bytes) // SPAN_TILES
            most = max(most, layer.num_kv_heads * rows * (spans + SPARE_SPANS) * _row_bytes(layer))
    return most


def decode_rows(sequences: int, tokens: int, group: int) -> int:
    """Return the query rows of a kv head that a step has room for, at most.

    Each sequence's rows fill entries of `ENTRY_ROWS` or half as many, the last of them in part.
    """
    lacking = ENTRY_ROWS - math.gcd(group, ENTRY_ROWS)  # of a sequence's last entry
    return min(tokens * group + min(sequences, tokens) * lacking, sequences * DECODE_TOKENS * group)


def tile_keys(layer: LayerInfo, shared_bytes: int) -> int:
    """Return the keys of a tile: as many as leave a block of the device room for `GOOD_STAGES` tiles."""
    size = _kernel_head_size(layer)
    warps, warp_keys = max(2, min(8, 1024 // size)), 32 if size <= 64 else 16
    while warps > 1:
        sums = warps * (4 * size + 16) * ELEMENT_BYTES["float32"]
        stage = 2 * warps * warp_keys * size * ELEMENT_BYTES["float16"]
        if min(GOOD_STAGES, 1 + warps) * stage + sums + OTHER_SHARED_BYTES <= shared_bytes:
            break
        warps //= 2
    return warps * warp_keys


def _kernel_head_size(layer: LayerInfo) -> int:
    return next(size for size in HEAD_SIZES if size >= layer.head_size)


def _row_bytes(layer: LayerInfo) -> int:
    """Return the bytes of a row's partial sum: its columns, maximum and denominator."""
    return (_kernel_head_size(layer) + 2) * ELEMENT_BYTES["float32"]
