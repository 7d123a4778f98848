"""Rounds float weights to codes of 4 or 8 bits, a few rows at a time.

Round to nearest takes a scale by a group's largest magnitude. The search tries smaller ones, too, and keeps, for each
group, the one whose squared error is least; it needs no data. Source: the clipping search of OmniQuant and AWQ
(arXiv 2308.13137, 2306.00978), without activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ortolan.element_types import element_type
from ortolan.errors import CheckpointError
from ortolan.export.checkpoint import Array
from ortolan.graphs.formats.low_bit import LowBit
from ortolan.graphs.formats.plan import MXFP4_GROUP

METHODS = ("search", "nearest", "gptq")
FP8_LARGEST = 448.0
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Magnitudes from which on a code is one higher, and those beyond which it is: halfway goes to the even code.
_E2M1_FROM = (0.75, 1.75, 3.5)
_E2M1_BEYOND = (0.25, 1.25, 2.5, 5)
_CACHED_WEIGHTS = 2**17  # that are quantized at a time, so that what is computed of them stays in a core's cache
_RATIOS = tuple(1 - step / 40 for step in range(1, 13))  # of the largest magnitude


def quantize(
    name: str, rows: Array, stored: LowBit, dtype: str, method: str, feedback: Array | None = None
) -> dict[str, Array]:
    """Quantize rows of a weight.

    Args:
        name: of the weight, for messages.
        rows: [n, K], any float type; of fp8 in blocks, all the rows of each block.
        stored: int4, int8, fp8 or mxfp4.
        dtype: element type of int scales.
        method: "search" or "nearest", or "gptq", which is "search" where there is no feedback.
        feedback: [K, K], of the layer's inputs, see `ortolan.export.calibration`; int4 and int8 alone.

    Returns:
        Arrays by port of LowBitLinear.

    Raises:
        CheckpointError: a weight is not finite.
    """
    wide = np.asarray(rows, np.float32)
    if not np.isfinite(wide).all():
        raise CheckpointError(f"{name} has values that are not finite; low-bit formats do not hold them")
    if stored.kind == "fp8":
        return _fp8(wide, stored)
    if stored.kind == "mxfp4":
        return _mxfp4(wide, method)
    grouped = wide.reshape(len(wide), stored.groups(wide.shape[1]), -1)
    integers = _Integers(stored, element_type(dtype).numpy)
    return integers.quantize(grouped, method) if feedback is None else integers.compensated(grouped, feedback)


def _fp8(rows: Array, stored: LowBit) -> dict[str, Array]:
    count, columns = rows.shape
    groups, high = stored.groups(columns), stored.scale_rows
    padded = np.zeros((-(-count // high) * high, columns), np.float32)
    padded[:count] = rows
    blocks = padded.reshape(-1, high, groups, columns // groups)
    largest = np.abs(blocks).max(axis=(1, 3))
    scales = np.where(largest > 0, largest / np.float32(FP8_LARGEST), 1).astype(np.float32)
    scaled = np.clip(blocks / scales[:, None, :, None], -FP8_LARGEST, FP8_LARGEST)
    codes = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(padded.shape)[:count]
    return {"codes": np.ascontiguousarray(codes), "float_scales": scales}


def _mxfp4(rows: Array, method: str) -> dict[str, Array]:
    """Quantize groups of 32; a scale puts the largest magnitude into the last binade of e2m1, or the search doubles it.

    Source: OCP Microscaling Formats (MX) v1.0, section 6.3.
    """
    groups = rows.reshape(len(rows), -1, MXFP4_GROUP)
    largest = np.abs(groups).max(axis=2)
    _, exponents = np.frexp(largest)  # largest is m * 2^e with m from 0.5 on; e2m1 reaches 6, of the binade 2^2
    powers = np.where(largest > 0, exponents.astype(np.int32) - 3, 0).clip(-127, 127)
    if method != "nearest":
        tried = (powers, np.minimum(powers + 1, 127))
        errors = np.stack([_mxfp4_errors(groups, each) for each in tried])
        powers = np.choose(errors.argmin(axis=0), np.stack(tried))
    codes = _e2m1_codes(_scaled(groups, powers)).reshape(rows.shape)
    return {"codes": pack_nibbles(codes), "scale_codes": (powers + 127).astype(np.uint8)}


def _scaled(groups: Array, powers: Array) -> Array:
    return np.asarray(groups * np.ldexp(np.float32(1), -powers)[..., None])


def _mxfp4_errors(groups: Array, powers: Array) -> Array:
    scaled = _scaled(groups, powers)
    codes = _e2m1_codes(scaled)
    scaled -= np.copysign(_E2M1[codes & 7], scaled)
    return np.asarray(np.ldexp(np.einsum("ngk,ngk->ng", scaled, scaled), 2 * powers))


def _e2m1_codes(values: Array) -> Array:
    """Round to e2m1, to nearest even, saturating."""
    sizes = np.abs(values)
    codes = np.signbit(values).astype(np.uint8) << 3
    for limit in _E2M1_FROM:
        codes += sizes >= limit
    for limit in _E2M1_BEYOND:
        codes += sizes > limit
    return np.asarray(codes)


class _Integers:
    """Quantizes groups [n, G, g] to int4 or int8, symmetric around a code in the middle or with zero points."""

    def __init__(self, stored: LowBit, element: np.dtype[Any]) -> None:
        self._stored, self._element = stored, element
        self._middle, self._last = 1 << (stored.bits - 1), (1 << stored.bits) - 1

    def quantize(self, groups: Array, method: str) -> dict[str, Array]:
        rows = max(1, _CACHED_WEIGHTS // groups[0].size)
        parts = [self._rows(groups[begin : begin + rows], method) for begin in range(0, len(groups), rows)]
        return {port: np.concatenate([part[port] for part in parts]) for port in parts[0]}

    def compensated(self, groups: Array, feedback: Array) -> dict[str, Array]:
        """Round column by column; columns that follow make up for each error. Source: GPTQ, arXiv 2210.17323."""
        rows, count, size = groups.shape
        left = np.array(groups.reshape(rows, -1))  # [n, K]
        codes = np.empty(left.shape, np.uint8)
        grids = []
        for begin in range(0, count * size, size):
            end = begin + size
            grid = self._grid(left[:, None, begin:end], "search")
            errors = np.empty((rows, size), np.float32)
            for column in range(begin, end):
                weights = left[:, column].reshape(-1, 1, 1)
                code = grid.codes(weights)
                codes[:, column] = code[:, 0, 0]
                missed = weights[:, 0] - (code[:, 0] - grid.zeros) * grid.scales  # [n, 1]
                errors[:, column - begin] = missed[:, 0] / feedback[column, column]
                left[:, column:end] -= errors[:, column - begin, None] * feedback[column, column:end]
            left[:, end:] -= errors @ feedback[begin:end, end:]
            grids.append(grid)
        scales, zeros = (
            np.concatenate(parts, axis=1) for parts in zip(*((g.scales, g.zeros) for g in grids), strict=True)
        )
        return self._arrays(codes, _Grid(scales, zeros, self._last))

    def _rows(self, groups: Array, method: str) -> dict[str, Array]:
        best = self._grid(groups, method)
        return self._arrays(best.codes(groups).astype(np.uint8).reshape(len(groups), -1), best)

    def _arrays(self, codes: Array, grid: _Grid) -> dict[str, Array]:
        found = {"codes": self._packed(codes), "scales": grid.scales.astype(self._element)}
        return found | ({"zero_points": self._packed(grid.zeros.astype(np.uint8))} if self._stored.zero_points else {})

    def _grid(self, groups: Array, method: str) -> _Grid:
        low, high = self._range(groups)
        best = self._at(groups, low, high)
        least = best.squared_errors(groups)
        for ratio in _RATIOS if method != "nearest" else ():
            tried = self._at(groups, low * np.float32(ratio), high * np.float32(ratio))
            errors = tried.squared_errors(groups)
            better = errors < least
            np.copyto(least, errors, where=better)
            np.copyto(best.scales, tried.scales, where=better)
            np.copyto(best.zeros, tried.zeros, where=better)
        return best

    def _range(self, groups: Array) -> tuple[Array, Array]:
        """Return the values of the first code and of the last, [n, G] each."""
        if self._stored.zero_points:
            low = np.minimum(groups.min(axis=2), 0)
            return low, np.maximum(groups.max(axis=2), 0)
        # The first code lies furthest from the middle: it takes the largest magnitude, and its sign the scale's.
        least, most = groups.min(axis=2), groups.max(axis=2)
        low = np.where(-least >= most, least, most)
        return low, -low * np.float32((self._middle - 1) / self._middle)

    def _at(self, groups: Array, low: Array, high: Array) -> _Grid:
        """Spread the codes evenly between two values of each group."""
        scales = (high - low) / np.float32(self._last)
        scales = scales.astype(self._element).astype(np.float32)
        scales = np.where((scales != 0) & np.isfinite(scales), scales, np.float32(1))
        if self._stored.zero_points:
            zeros = np.clip(np.rint(-low / scales), 0, self._last)
        else:
            zeros = np.full(scales.shape, np.float32(self._middle))
        return _Grid(scales, zeros, self._last)

    def _packed(self, codes: Array) -> Array:
        if self._stored.bits == 8:
            return np.ascontiguousarray(codes)
        return pack_nibbles(codes)


@dataclass(frozen=True, slots=True)
class _Grid:
    """The values that codes stand for, (code - zero) * scale; scales and zeros are [n, G] float32."""

    scales: Array
    zeros: Array
    last: int

    def codes(self, groups: Array) -> Array:
        """Round [n, G, g] to codes, as float32."""
        codes = np.rint(groups / self.scales[..., None])
        codes += self.zeros[..., None]
        return np.clip(codes, 0, self.last, out=codes)

    def squared_errors(self, groups: Array) -> Array:
        """Sum the squares of what rounding changes, [n, G]."""
        errors = self.codes(groups)
        errors -= self.zeros[..., None]
        errors *= self.scales[..., None]
        errors -= groups
        return np.asarray(np.einsum("ngk,ngk->ng", errors, errors))


def pack_nibbles(codes: Array) -> Array:
    """Pack codes of 4 bits, [n, K] uint8, two in a byte, the first in its low half; an odd last one has 0 above."""
    if codes.shape[1] % 2:
        codes = np.concatenate([codes, np.zeros((len(codes), 1), np.uint8)], axis=1)
    return np.asarray(codes[:, ::2] | codes[:, 1::2] << 4, np.uint8)
