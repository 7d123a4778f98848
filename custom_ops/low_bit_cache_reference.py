"""Codes and scales of low-bit caches, in NumPy: bit for bit what the operators write, and what they read."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LARGEST = {np.dtype(np.int8): np.float32(127), np.dtype(ml_dtypes.float8_e4m3fn): np.float32(448)}


def holds_codes(cache: Array) -> bool:
    """Tell whether a cache holds codes, which need scales."""
    return cache.dtype in LARGEST


def quantise(rows: Array, dtype: Any) -> tuple[Array, npt.NDArray[np.float32]]:
    """Turn rows [..., D] into codes of `dtype` [..., D] and scales [...]; a NaN shows in its row's scale."""
    code_type = np.dtype(dtype)
    wide, limit = rows.astype(np.float32), LARGEST[code_type]
    largest = np.abs(wide).max(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factor = np.where(largest == 0, np.float32(0), limit / largest)
        units = wide * factor[..., None]
    units = np.where(np.isnan(units), np.float32(0), np.clip(units, -limit, limit))
    codes = np.rint(units) if code_type == np.int8 else units
    return codes.astype(code_type), (largest / limit).astype(np.float32)


def dequantise(codes: Array, scales: Array) -> npt.NDArray[np.float32]:
    """Return scale * code of rows [..., D] as float32."""
    return np.asarray(scales[..., None].astype(np.float32) * codes.astype(np.float32))
