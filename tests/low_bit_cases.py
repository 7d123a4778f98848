"""Draws inputs of the operators of low-bit weights, runs them, and computes them in plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import devices
import numpy as np
from expert_cases import ExpertCase, expert_feeds, plain_experts, run
from fused_cases import Feeds

from ortolan.custom_ops import low_bit_reference
from ortolan.custom_ops.fused_reference import fused_linear
from ortolan.custom_ops.low_bit_schema import WEIGHT_PORTS

PLAIN_EXPERTS = ExpertCase(hidden=128, inner=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBitCase:
    """Sizes and options of one LowBitLinear."""

    format: str = "int4"
    group_size: int = 32
    scale_rows: int = 1
    inputs: int = 128
    outputs: int = 40
    zero_points: bool = False
    input_format: str = "none"
    input_scale: float = 0.0
    norm: bool = False
    bias: bool = False
    residual: bool = False
    activation: str = "none"
    output: str = "y"

    @property
    def weight_attributes(self) -> dict[str, object]:
        """Attributes that say what codes mean."""
        return {"format": self.format, "group_size": self.group_size, "scale_rows": self.scale_rows}

    @property
    def attributes(self) -> dict[str, object]:
        """Attributes of the node."""
        inputs = {"input_format": self.input_format, "input_scale": self.input_scale}
        return {**self.weight_attributes, **inputs, "activation": self.activation, "epsilon": 1e-5}

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.outputs * (1 if self.activation == "none" else 2)


def weight_feeds(case: LowBitCase, rng: np.random.Generator) -> Feeds:
    """Draw a weight whose values are about 1 / sqrt(inputs); every code occurs."""
    bits = 8 if case.format in ("int8", "fp8") else 4
    rows, groups = case.rows, case.inputs // (case.group_size or case.inputs)
    codes = rng.integers(0, 256, (rows, case.inputs * bits // 8), np.uint8)
    size = np.float32(case.inputs**-0.5)

    def draw_scales(count: int, wide: int, largest: float) -> np.ndarray:
        return (size / np.float32(largest) * (0.5 + rng.random((count, wide), np.float32))).astype(np.float32)

    if case.format in ("int4", "int8"):
        feeds = {"codes": codes, "scales": draw_scales(rows, groups, 2.0 ** (bits - 2)).astype(devices.element())}
        if case.zero_points:
            feeds["zero_points"] = rng.integers(0, 256, (rows, -(-groups * bits // 8)), np.uint8)
        return feeds
    if case.format == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0x7E  # NaN
        return {"codes": codes, "float_scales": draw_scales(-(-rows // case.scale_rows), groups, 64)}
    if case.format == "mxfp4":
        return {"codes": codes, "scale_codes": rng.integers(120, 126, (rows, groups), np.uint8)}
    scale_codes = rng.integers(1, 0x78, (rows, groups), np.uint8)
    return {"codes": codes, "scale_codes": scale_codes, "float_scales": draw_scales(rows, 1, 32)}


def low_bit_feeds(case: LowBitCase, tokens: int, seed: int = 0) -> Feeds:
    """Draw a step."""
    rng, element = np.random.default_rng(seed), devices.element()

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(element)

    feeds = {"x": draw(tokens, case.inputs), **weight_feeds(case, rng)}
    if case.norm:
        feeds["norm_weight"] = draw(case.inputs)
    if case.bias:
        feeds["bias"] = draw(case.rows)
    if case.residual:
        feeds["residual"] = draw(tokens, case.outputs)
    return feeds


def run_low_bit(case: LowBitCase, feeds: Feeds) -> np.ndarray:
    """Run LowBitLinear: its one output [T, O].

    Tensor cores add products of codes with about 14 bits, so results of rounded inputs are judged as 16-bit elements.
    """
    dtype = np.dtype(np.float32) if case.output == "y_float32" else feeds["x"].dtype
    shape = (len(feeds["x"]), case.outputs)
    found = run("LowBitLinear", feeds, {case.output: (shape, dtype)}, **case.attributes)[case.output]
    return found if case.input_format == "none" else found.astype(feeds["x"].dtype)


def running_sums(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Multiply x [T, K] by weight [R, K] transposed, product after product, as libraries for GPUs add them up."""
    sums = np.zeros((len(x), len(weight)), np.float32)
    for column, values in zip(x.T, weight.T, strict=True):
        sums += column[:, np.newaxis] * values
    return sums


def rounded_inputs(case: LowBitCase, x: np.ndarray) -> np.ndarray:
    """Round rows [T, K] as the node asks, and as the CPU does for int4 and int8: to 16 bits, 128 to a step."""
    if case.input_format == "fp8":
        return low_bit_reference.round_inputs(x, case.group_size, case.input_scale).astype(np.float32)
    columns, group = 128, case.group_size or x.shape[1]
    fits = case.format in ("int4", "int8") and (group in (32, 64, x.shape[1]) or group % columns == 0)
    if devices.current() != "cpu" or not fits:
        return x
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % columns))).reshape(len(x), -1, columns)
    largest = np.maximum(np.abs(padded).max(axis=2, keepdims=True), 2.0**-100)
    fraction, exponent = np.frexp(largest)
    step = np.ldexp(np.float32(1), exponent - np.where(fraction > 32639 / 32768, 14, 15))
    return (np.round(padded / step) * step).reshape(len(x), -1)[:, : x.shape[1]].astype(np.float32)


def plain_low_bit(case: LowBitCase, feeds: Feeds) -> np.ndarray:
    """Compute [T, O] in float32, with inputs as the device rounds them.

    Normalised rows, dequantised weights and sums have the element type's precision.
    """
    element = feeds["x"].dtype
    weight = low_bit_reference.dequantize(
        **{name: feeds[name] for name in WEIGHT_PORTS if name in feeds}, **case.weight_attributes
    )
    x = feeds["x"].astype(np.float32)
    if case.norm:
        mean = np.mean(x * x, axis=1, keepdims=True, dtype=np.float32)
        x = devices.rounded(x / np.sqrt(mean + np.float32(1e-5)) * feeds["norm_weight"].astype(np.float32), element)
    others = {name: feeds[name].astype(np.float32) for name in ("bias", "residual") if name in feeds}
    rounded = devices.rounded(weight.astype(np.float32), element)
    product = fused_linear(
        running_sums(rounded_inputs(case, x), rounded),
        np.eye(len(rounded), dtype=np.float32),
        **others,
        activation=case.activation,
    )
    return np.asarray(product, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBitExpertCase:
    """Sizes and options of one LowBitExperts."""

    experts: ExpertCase = PLAIN_EXPERTS
    format: str = "int4"
    group_size: int = 32
    scale_rows: int = 1
    zero_points: bool = False

    @property
    def attributes(self) -> dict[str, object]:
        """Attributes of the node."""
        return {**self.experts.attributes, **self.weight_case(1, 1).weight_attributes}

    def weight_case(self, inputs: int, outputs: int) -> LowBitCase:
        """Describe one expert's weight as LowBitLinear has it."""
        return LowBitCase(
            format=self.format,
            group_size=self.group_size,
            scale_rows=self.scale_rows,
            inputs=inputs,
            outputs=outputs,
            zero_points=self.zero_points,
        )


def low_bit_expert_feeds(case: LowBitExpertCase, tokens: int, seed: int = 0) -> Feeds:
    """Draw a step; each token takes different experts."""
    rng, sizes = np.random.default_rng(seed), case.experts
    dense = expert_feeds(sizes, tokens, seed)
    feeds = {name: values for name, values in dense.items() if name not in ("gate_up", "down")}
    shapes = {"gate_up": (sizes.hidden, 2 * sizes.inner), "down": (sizes.inner, sizes.hidden)}
    for name, (inputs, outputs) in shapes.items():
        each = [weight_feeds(case.weight_case(inputs, outputs), rng) for _ in range(sizes.experts)]
        feeds |= {f"{name}_{port}": np.stack([weight[port] for weight in each]) for port in each[0]}
    return feeds


def run_low_bit_experts(case: LowBitExpertCase, feeds: Feeds) -> np.ndarray:
    """Run LowBitExperts: y [T, H]."""
    return run("LowBitExperts", feeds, {"y": (feeds["x"].shape, feeds["x"].dtype)}, **case.attributes)["y"]


def plain_low_bit_experts(case: LowBitExpertCase, feeds: Feeds) -> np.ndarray:
    """Compute y [T, H] in float32, with inner rows and dequantised weights rounded to the element type."""
    options = case.weight_case(1, 1).weight_attributes
    dense = {name: values for name, values in feeds.items() if not name.startswith(low_bit_reference.CODED)}
    for name in ("gate_up", "down"):
        weight = low_bit_reference.dequantize_experts(feeds, name, **options)
        dense[name] = devices.rounded(weight.astype(np.float32), feeds["x"].dtype)
    sizes = case.weight_case(1, 1)
    return plain_experts(case.experts, dense, lambda rows: rounded_inputs(sizes, rows) if len(rows) else rows)
