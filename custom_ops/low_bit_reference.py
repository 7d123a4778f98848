"""LowBitLinear and LowBitExperts in NumPy and float64, the oracle of their kernels' tests."""

# ruff: noqa: A002, arguments are named after the attributes of the operator

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ortolan.custom_ops.expert_reference import moe_experts
from ortolan.custom_ops.fused_reference import fused_linear, rms_norm_add
from ortolan.custom_ops.low_bit_cache_reference import quantise
from ortolan.custom_ops.low_bit_schema import WEIGHT_PORTS
from ortolan.custom_ops.reference import Array, Floats

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CODED = tuple(f"{name}_{port}" for name in ("gate_up", "down") for port in WEIGHT_PORTS)


def unpack_nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return codes of 4 bits, [..., 2 * n] of [..., n] bytes; the low half of a byte comes first."""
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return np.asarray(pairs.reshape(*packed.shape[:-1], -1))


def decode_e4m3(codes: Array) -> Floats:
    """Return the values of e4m3 codes."""
    return np.asarray(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64))


def dequantize(
    codes: Array,
    scales: Array | None = None,
    zero_points: Array | None = None,
    scale_codes: Array | None = None,
    float_scales: Array | None = None,
    *,
    format: str = "int4",
    group_size: int = 0,
    scale_rows: int = 1,
) -> Floats:
    """Return the weight [N, I] that codes stand for, as LowBitLinear's inputs of these names describe it."""
    wide = codes if format in ("int8", "fp8") else unpack_nibbles(codes.astype(np.uint8))
    rows, columns = wide.shape
    size = group_size or columns
    grouped = wide.reshape(rows, columns // size, size)
    if format in ("int4", "int8"):
        assert scales is not None
        values = grouped.astype(np.float64) - _zero_points(zero_points, format, columns // size)
        factors = scales.astype(np.float64)
    elif format == "fp8":
        assert float_scales is not None
        values = decode_e4m3(grouped)
        factors = float_scales.astype(np.float64).repeat(scale_rows, axis=0)[:rows]
    else:
        assert scale_codes is not None
        values = E2M1[grouped]
        factors = 2.0 ** (scale_codes.astype(np.float64) - 127) if format == "mxfp4" else decode_e4m3(scale_codes)
        if float_scales is not None:
            factors = factors * float_scales.astype(np.float64)
    return np.asarray((values * factors[:, :, None]).reshape(rows, columns))


def _zero_points(packed: Array | None, format: str, groups: int) -> Floats:
    if packed is None:
        return np.full((1, 1, 1), 8.0 if format == "int4" else 128.0)
    codes = unpack_nibbles(packed.astype(np.uint8))[:, :groups] if format == "int4" else packed
    return np.asarray(codes.astype(np.float64)[:, :, None])


def round_inputs(x: Array, group_size: int = 0, input_scale: float = 0.0) -> Floats:
    """Return rows [T, I] as LowBitLinear rounds them to e4m3, each group of a token with a scale of its own.

    Args:
        x: rows, normalised already; the float32 they have is what is rounded.
        group_size: columns that share a scale; 0: all of a row.
        input_scale: of all groups; 0: their largest magnitude / 448.
    """
    groups = x.astype(np.float32).reshape(len(x), -1, group_size or x.shape[1])
    if input_scale:
        units = np.clip(groups * (np.float32(1) / np.float32(input_scale)), -448, 448)
        codes, scales = units.astype(ml_dtypes.float8_e4m3fn), np.full(groups.shape[:2], input_scale, np.float32)
    else:
        codes, scales = quantise(groups, ml_dtypes.float8_e4m3fn)
    return np.asarray((codes.astype(np.float64) * scales[..., None].astype(np.float64)).reshape(x.shape))


def low_bit_linear(
    x: Array,
    codes: Array,
    scales: Array | None = None,
    zero_points: Array | None = None,
    scale_codes: Array | None = None,
    float_scales: Array | None = None,
    norm_weight: Array | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    format: str = "int4",
    group_size: int = 0,
    scale_rows: int = 1,
    input_format: str = "none",
    input_scale: float = 0.0,
    epsilon: float = 1e-6,
    activation: str = "none",
) -> Floats:
    """Return residual + act(RMSNorm(x) @ weight^T + bias), [T, O], of x [T, I]; only inputs of fp8 are rounded."""
    weight = dequantize(
        codes,
        scales,
        zero_points,
        scale_codes,
        float_scales,
        format=format,
        group_size=group_size,
        scale_rows=scale_rows,
    )
    if input_format == "fp8":
        if norm_weight is not None:
            x, norm_weight = rms_norm_add(x, norm_weight, epsilon=epsilon).astype(x.dtype), None
        x = round_inputs(x, group_size, input_scale)
    return fused_linear(x, weight, norm_weight, bias, residual, epsilon=epsilon, activation=activation)


def dequantize_experts(feeds: Mapping[str, Array], name: str, **options: Any) -> Floats:
    """Return the weights [E, rows, columns] of LowBitExperts's inputs that begin with `name`_."""
    ports = {port: feeds[f"{name}_{port}"] for port in WEIGHT_PORTS if f"{name}_{port}" in feeds}
    each = [
        dequantize(**{port: values[expert] for port, values in ports.items()}, **options)
        for expert in range(len(ports["codes"]))
    ]
    return np.stack(each)


def low_bit_experts(*, format: str = "int4", group_size: int = 0, scale_rows: int = 1, **call: Any) -> Floats:
    """Return what MoeExperts returns for the weights that LowBitExperts's inputs stand for, [T, H]; nothing is rounded.

    `call` holds LowBitExperts's inputs by name, and the attributes that MoeExperts has.
    """
    options = {"format": format, "group_size": group_size, "scale_rows": scale_rows}
    weights = {name: dequantize_experts(call, name, **options) for name in ("gate_up", "down")}
    others = {name: value for name, value in call.items() if not name.startswith(CODED)}
    return moe_experts(**others, gate_up=weights["gate_up"], down=weights["down"])
