"""The operators of low-bit weights, as `ortolan.custom_ops.schema` lists it."""

from __future__ import annotations

from ortolan.custom_ops.expert_schema import MOE_EXPERTS
from ortolan.custom_ops.schema_parts import ELEMENT, EPSILON, FLOAT, UINT8, Attribute, Operator, Port

FORMAT = Attribute(
    name="format",
    default="int4",
    choices=("int4", "int8", "fp8", "mxfp4", "nvfp4"),
    enumeration="LowBitFormat",
    allowed='"int4", "int8", "fp8", "mxfp4" or "nvfp4"',
    doc="What codes and scales mean.",
)
SCALE_ROWS = Attribute(
    name="scale_rows", default=1, least=1, allowed="1 or more", doc="fp8: rows that share a float scale."
)


def stacked_ports(name: str, rows: str, columns: str, symbol: str) -> tuple[Port, ...]:
    """Describe a weight [E, rows, columns] of few bits: its codes, and what comes with them; `symbol` counts groups."""
    return (
        Port(
            name=f"{name}_codes",
            shape=f"[E, {rows}, {columns} / 2] or [E, {rows}, {columns}]",
            type=UINT8,
            doc="Codes of 4 or 8 bits of each expert's weight.",
        ),
        Port(
            name=f"{name}_scales",
            shape=f"[E, {rows}, {symbol}]",
            type=ELEMENT,
            doc="int4, int8: a scale per group.",
            optional=True,
        ),
        Port(
            name=f"{name}_zero_points",
            shape=f"[E, {rows}, ceil({symbol} / 2)] or [E, {rows}, {symbol}]",
            type=UINT8,
            doc="int4 (two in a byte), int8: a zero point per group.",
            optional=True,
        ),
        Port(
            name=f"{name}_scale_codes",
            shape=f"[E, {rows}, {symbol}]",
            type=UINT8,
            doc="mxfp4, nvfp4: a scale per group.",
            optional=True,
        ),
        Port(
            name=f"{name}_float_scales",
            shape=f"[E, ceil({rows} / scale_rows), {symbol}] or [E, {rows}, 1]",
            type=FLOAT,
            doc="fp8: a scale per block; nvfp4: one per row.",
            optional=True,
        ),
    )


GATE_UP = stacked_ports("gate_up", "2 * I", "H", "Gh")
DOWN = stacked_ports("down", "H", "I", "Gi")
WEIGHT_PORTS = tuple(port.name.removeprefix("down_") for port in DOWN)  # as LowBitLinear names them
X, EXPERTS, WEIGHTS, _, _, GATE_UP_BIAS, DOWN_BIAS, RESIDUAL = MOE_EXPERTS.inputs

LOW_BIT_OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="LowBitExperts",
        doc="MoeExperts over weights of few bits: each expert's gate_up [2 * I, H] and down [H, I] as LowBitLinear "
        "describes a weight, one behind the other; Gh = H / group_size and Gi = I / group_size groups, one if that is "
        "0. Both have one format. Sums are float32; the inner rows and y are rounded to T1. Only the chosen experts' "
        "weights are read. Deterministic. A token's result does not depend on the other tokens, as long as one kernel "
        "family serves the step: on CUDA, steps of up to 32 * E pairs of token and expert have one, larger ones of "
        "16-bit elements another, for which weights are rounded to T1; up to 3 / 2 * E pairs, int4 and mxfp4 have one "
        "of their own. All round each expert's share of y to T1. An expert outside 0 .. E - 1 is refused on the CPU; "
        "on CUDA it adds nothing. Where docs/quantisation.md says so, inputs are rounded to 16 bits.",
        inputs=(X, EXPERTS, WEIGHTS, GATE_UP[0], DOWN[0], *GATE_UP[1:], *DOWN[1:], GATE_UP_BIAS, DOWN_BIAS, RESIDUAL),
        outputs=(Port(name="y", shape="[T, H]", type=ELEMENT, doc="The result.", spends=15),),
        attributes=(
            FORMAT,
            Attribute(
                name="group_size",
                default=0,
                least=0,
                allowed="0 (a whole row), or an even divisor of H and of I",
                doc="Columns that share a scale.",
            ),
            SCALE_ROWS,
            *MOE_EXPERTS.attributes,
        ),
        workspace=True,
        params_header="low_bit_expert_params.h",
    ),
    Operator(
        name="LowBitLinear",
        doc="FusedLinear over a weight [N, I] of few bits, N = O or 2 * O: y = residual + act(RMSNorm(x) @ weight^T + "
        "bias), in float32; the normalised rows and the result are rounded to T1. Groups are of group_size columns, "
        "G = I / group_size of them, one if that is 0. int4, int8: weight = (code - zero point) * scales, and a zero "
        "point is 8 or 128 where none are given. fp8: e4m3 code * float_scales, for scale_rows rows each. mxfp4: e2m1 "
        "code * 2^(scale_codes - 127), groups of 32. nvfp4: e2m1 code * e4m3 scale_codes * float_scales of the row, "
        "groups of 16. Codes of 4 bits lie two in a byte, the first in its low half. With input_format fp8 the rows, "
        "normalised where there is a norm, are rounded to e4m3, with a scale for each token and group: the group's "
        "largest magnitude / 448, and codes e4m3(x * (448 / largest)), 0 where all are 0; or codes e4m3(x * (1 / "
        "input_scale)), saturating, where that is given. Sums are then of products of codes, times both scales; tensor "
        "cores add up to 512 such products with about 14 bits before these join a float32 sum. One of the two outputs "
        "is asked for. A row's result does not depend on the other rows of a step of up to 8 rows, or of 9 to 16; on "
        "the CPU, on no other row. Where docs/quantisation.md says so, inputs are rounded to 16 bits.",
        inputs=(
            Port(name="x", shape="[T, I]", type=ELEMENT, doc="Rows of I features."),
            Port(
                name="codes",
                shape="[N, I / 2] or [N, I]",
                type=UINT8,
                doc="Codes of 4 or 8 bits; MatMulNBits's, row by row.",
            ),
            Port(name="scales", shape="[N, G]", type=ELEMENT, doc="int4, int8: a scale per group.", optional=True),
            Port(
                name="zero_points",
                shape="[N, ceil(G / 2)] or [N, G]",
                type=UINT8,
                doc="int4 (two in a byte), int8: a zero point per group.",
                optional=True,
            ),
            Port(name="scale_codes", shape="[N, G]", type=UINT8, doc="mxfp4, nvfp4: a scale per group.", optional=True),
            Port(
                name="float_scales",
                shape="[ceil(N / scale_rows), G] or [N, 1]",
                type=FLOAT,
                doc="fp8: a scale per block; nvfp4: one per row.",
                optional=True,
            ),
            Port(
                name="norm_weight",
                shape="[I]",
                type=ELEMENT,
                doc="Weight of an RMSNorm of x; absent: x is used as it is.",
                optional=True,
            ),
            Port(name="bias", shape="[N]", type=ELEMENT, doc="Added to the product.", optional=True),
            Port(name="residual", shape="[T, O]", type=ELEMENT, doc="Added to the result.", optional=True),
        ),
        outputs=(
            Port(name="y", shape="[T, O]", type=ELEMENT, doc="The result.", optional=True, spends=8),
            Port(name="y_float32", shape="[T, O]", type=FLOAT, doc="The result, not rounded to T1.", optional=True),
        ),
        attributes=(
            FORMAT,
            Attribute(
                name="group_size",
                default=0,
                least=0,
                allowed="0 (a whole row), or an even divisor of I",
                doc="Columns that share a scale.",
            ),
            SCALE_ROWS,
            Attribute(
                name="input_format",
                default="none",
                choices=("none", "fp8"),
                enumeration="InputFormat",
                allowed='"none", or "fp8" where format is "fp8"',
                doc="What inputs are rounded to before they are multiplied.",
            ),
            Attribute(
                name="input_scale",
                default=0.0,
                least=0,
                allowed="0 (a scale for each token and group), or more with input_format fp8",
                doc="Scale of all rounded inputs.",
            ),
            EPSILON,
            Attribute(
                name="activation",
                default="none",
                choices=("none", "silu_mul", "gelu_mul", "gelu_tanh_mul"),
                enumeration="GatedActivation",
                allowed='"none", "silu_mul", "gelu_mul" (erf) or "gelu_tanh_mul"',
                doc="Gated activation; the first O rows are the gate, the last O the factor.",
            ),
        ),
        workspace=True,
        params_header="low_bit_params.h",
    ),
)
