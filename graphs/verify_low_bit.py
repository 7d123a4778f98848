"""Checks that the tensors of a low-bit weight fit each other and the format that a node names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, get_args

import onnx

from ortolan.custom_ops.low_bit_schema import WEIGHT_PORTS
from ortolan.graphs.formats.low_bit import BITS, INTEGERS, Kind, LowBit

FIXED_GROUPS = {"mxfp4": 32, "nvfp4": 16}
Fail = Callable[[str], NoReturn]


def coded_shape(
    node: onnx.NodeProto, ports: Mapping[str, str], dims: Mapping[str, list[int]], rank: int, fail: Fail
) -> list[int]:
    """Return the shape of a weight that is stored in codes, [N, K] or a stack of these.

    Args:
        node: a LowBitLinear or LowBitExperts.
        ports: names of the weight's tensors by port of LowBitLinear; "" where there is none.
        dims: of the graph's weights.
        rank: of the weight.
        fail: raises an error that says a problem.
    """
    stored = _format(node, bool(ports["zero_points"]), fail)
    codes = ports["codes"]
    shape = dims.get(codes)
    if shape is None or len(shape) != rank:
        fail(f"codes '{codes}' must be a weight of rank {rank}; it is {shape or 'not a weight'}")
    columns = shape[-1] * 8 // stored.bits
    group = stored.group_size or columns
    if columns % group or (stored.bits == 4 and group % 2):
        fail(f"group_size {stored.group_size} must be 0 or an even divisor of the {columns} columns of '{codes}'")
    whole = (*shape[:-1], columns)
    expected = {port: list(wanted) for port, (_, wanted) in stored.ports(whole, "float32").items()}
    for port in WEIGHT_PORTS:
        name = ports[port]
        found = dims.get(name) if name else None
        if port not in expected and name:
            fail(f"{port} '{name}' is given, and {stored.kind} has none")
        if port in expected and found != expected[port]:
            fail(f"{port} '{name}' must be a weight {expected[port]}; it is {found or 'not a weight'}")
    return list(whole)


def _format(node: onnx.NodeProto, zero_points: bool, fail: Fail) -> LowBit:
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    kind: Any = given.get("format", b"int4").decode(errors="replace")
    group, rows = given.get("group_size", 0), given.get("scale_rows", 1)
    if kind not in BITS:
        fail(f"format {kind!r} is not one of {', '.join(get_args(Kind))}")
    fixed = FIXED_GROUPS.get(kind)
    if fixed and group != fixed:
        fail(f"group_size is {group}; {kind} has groups of {fixed}")
    if rows < 1 or (rows > 1 and kind != "fp8"):
        fail(f"scale_rows is {rows}; it must be 1, or more in fp8")
    inputs, scale = given.get("input_format", b"none"), given.get("input_scale", 0.0)
    if inputs not in (b"none", b"fp8") or (inputs == b"fp8" and kind != "fp8"):
        fail(f"input_format {inputs.decode(errors='replace')!r} is not 'none', or 'fp8' with a weight of fp8")
    if not 0 <= scale < math.inf or (scale and inputs == b"none"):
        fail(f"input_scale is {scale}; it must be 0, or more with input_format 'fp8'")
    return LowBit(kind=kind, group_size=group, zero_points=zero_points and kind in INTEGERS, scale_rows=rows)
