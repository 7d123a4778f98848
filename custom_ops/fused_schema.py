"""The operators of the fused graph, as `ortolan.custom_ops.schema` lists them."""

from __future__ import annotations

from ortolan.custom_ops.qkv_schema import QKV_OPERATORS
from ortolan.custom_ops.schema_parts import (
    ELEMENT,
    EPSILON,
    FLOAT,
    INT32,
    INT64,
    PAST_LEN,
    QUERY_START,
    Attribute,
    Operator,
    Port,
)

FUSED_OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="FusedLinear",
        doc="A linear layer with what stands around it: y = residual + act(RMSNorm(x) @ weight^T + bias), in float32; "
        "the normalised rows and the result are rounded to T1. With a gated activation the first O rows of weight and "
        "bias are the gate, the last O the factor: act(gate) * factor. Or all rows are the gate, and the factor is an "
        "input. One of the two outputs is asked for. In a step of many tokens that asks for y, the product too is "
        "rounded to T1 before its bias and its gate. Up to 8 rows get the same bits whatever their number: in float32, "
        "and on compute capability 9.0 in 16 bits where a row of weight has 2 to 32 KB.",
        inputs=(
            Port(name="x", shape="[T, I]", type=ELEMENT, doc="Rows of I features."),
            Port(
                name="weight",
                shape="[O, I] or [2 * O, I]",
                type=ELEMENT,
                doc="Weight; 2 * O rows if gated without a factor.",
            ),
            Port(
                name="norm_weight",
                shape="[I]",
                type=ELEMENT,
                doc="Weight of an RMSNorm of x; absent: x is used as it is.",
                optional=True,
            ),
            Port(name="bias", shape="[O] or [2 * O]", type=ELEMENT, doc="Added to the product.", optional=True),
            Port(name="residual", shape="[T, O]", type=ELEMENT, doc="Added to the result.", optional=True),
            Port(
                name="factor",
                shape="[T, X]",
                type=ELEMENT,
                doc="Rows that hold the factor of a gated activation; not with a residual. Absent: weight gives the "
                "factor.",
                optional=True,
            ),
        ),
        outputs=(
            Port(name="y", shape="[T, O]", type=ELEMENT, doc="The result.", optional=True, spends=4),
            Port(
                name="y_float32",
                shape="[T, O]",
                type=FLOAT,
                doc="The result, not rounded to T1.",
                optional=True,
            ),
        ),
        attributes=(
            EPSILON,
            Attribute(
                name="activation",
                default="none",
                choices=("none", "silu_mul", "gelu_mul", "gelu_tanh_mul"),
                enumeration="GatedActivation",
                allowed='"none", "silu_mul", "gelu_mul" (erf) or "gelu_tanh_mul"',
                doc="Gated activation.",
            ),
            Attribute(
                name="factor_offset", default=0, least=0, allowed="0 or more", doc="With factor: its first column."
            ),
            Attribute(
                name="batch_invariant",
                default=0,
                least=0,
                most=1,
                allowed="0 or 1",
                doc="1: a row of the result has the same bits whatever rows stand beside it, and however many.",
            ),
        ),
        workspace=True,
        params_header="fused_params.h",
    ),
    *QKV_OPERATORS,
    Operator(
        name="RopeAngles",
        doc="Cosines and sines of RoPE: cosine = factor * cos(positions * inv_freq), in float32, and sine likewise.",
        inputs=(
            Port(name="positions", shape="[T]", type=INT64, doc="Logical position of each token."),
            Port(name="inv_freq", shape="[1, R]", type=FLOAT, doc="Radians per position of each rotated pair."),
        ),
        outputs=(
            Port(name="cosine", shape="[1, T, R]", type=FLOAT, doc="The cosines."),
            Port(name="sine", shape="[1, T, R]", type=FLOAT, doc="The sines."),
        ),
        attributes=(
            Attribute(name="factor", default=1.0, allowed="any finite number", doc="Multiplies cosine and sine."),
        ),
        params_header="fused_params.h",
        sizes=(("T", "num_tokens"), ("R", "rotary_pairs")),
    ),
    Operator(
        name="GatherRows",
        doc="Some rows, by their indices: output[r] = rows[row_indices[r]], and zeros where an index is not in "
        "0 .. T - 1.",
        inputs=(
            Port(name="rows", shape="[T, H]", type=ELEMENT, doc="Packed rows of H features."),
            Port(name="row_indices", shape="[R]", type=INT64, doc="Index of each wanted row, in any order."),
        ),
        outputs=(Port(name="output", shape="[R, H]", type=ELEMENT, doc="The wanted rows."),),
        params_header="fused_params.h",
        sizes=(("T", "num_rows"), ("H", "row_size"), ("R", "num_indices")),
    ),
    Operator(
        name="NarrowStep",
        doc="What the inputs of a step become where some rows go on and the others do not. The wanted rows are the "
        "last ones of their sequences, so these are sequences that begin later: past_len_out = past_len + the rows "
        "that a sequence drops.",
        inputs=(
            QUERY_START,
            PAST_LEN,
            Port(
                name="row_indices",
                shape="[R]",
                type=INT64,
                doc="Index of each wanted row, in ascending order. Where every row of the sequences is wanted, indices "
                "of any rows may follow; they belong to no sequence.",
            ),
            Port(
                name="positions",
                shape="[T]",
                type=INT64,
                doc="Logical position of each row; given exactly where positions_out is asked for.",
                optional=True,
            ),
        ),
        outputs=(
            Port(
                name="query_start_out",
                shape="[B+1]",
                type=INT32,
                doc="Sequence b owns the wanted rows query_start_out[b] .. query_start_out[b+1].",
            ),
            Port(
                name="past_len_out",
                shape="[B] or [B, Hkv]",
                type=INT32,
                doc="Tokens in the cache before the wanted rows, as past_len has them.",
            ),
            Port(
                name="positions_out",
                shape="[R]",
                type=INT64,
                doc="Positions of the wanted rows; 0 where an index is not in 0 .. T - 1.",
                optional=True,
            ),
        ),
        params_header="fused_params.h",
    ),
    Operator(
        name="RmsNormAdd",
        doc="A norm, and what follows it: y = (residual + RMSNorm(x)) * scale, in float32 and rounded once.",
        inputs=(
            Port(name="x", shape="[T, I]", type=ELEMENT, doc="The branch."),
            Port(name="norm_weight", shape="[I]", type=ELEMENT, doc="Weight of the RMSNorm."),
            Port(name="residual", shape="[T, I]", type=ELEMENT, doc="Added to the norm.", optional=True),
            Port(name="scale", shape="[1]", type=ELEMENT, doc="Multiplied with the sum.", optional=True),
        ),
        outputs=(Port(name="y", shape="[T, I]", type=ELEMENT, doc="The result."),),
        attributes=(EPSILON,),
        params_header="fused_params.h",
        sizes=(("T", "num_tokens"), ("I", "row_size")),
    ),
    Operator(
        name="GateMul",
        doc="What a gate lets through: y = residual + act(gate) * x, in float32 and rounded once. x are O columns of a "
        "wider row, the gates gate_size columns of another, each for O / gate_size columns of x. With a norm weight, "
        "each N columns of x are normalised first.",
        inputs=(
            Port(name="x", shape="[T, X]", type=ELEMENT, doc="Rows that hold x."),
            Port(name="gate", shape="[T, G]", type=ELEMENT, doc="Rows that hold the gates."),
            Port(
                name="norm_weight",
                shape="[N]",
                type=ELEMENT,
                doc="Weight of an RMSNorm of each N columns; absent: x is used as it is.",
                optional=True,
            ),
            Port(name="residual", shape="[T, O]", type=ELEMENT, doc="Added to the result.", optional=True),
        ),
        outputs=(Port(name="y", shape="[T, O]", type=ELEMENT, doc="The result."),),
        attributes=(
            Attribute(
                name="activation",
                default="silu",
                choices=("silu", "sigmoid", "softplus", "gelu", "gelu_tanh"),
                enumeration="GateActivation",
                allowed='"silu", "sigmoid", "softplus", "gelu" or "gelu_tanh"',
                doc="What gates go through.",
            ),
            Attribute(name="size", symbol="O", default=0, least=0, allowed="1 or more", doc="O: columns of y."),
            Attribute(name="x_offset", default=0, least=0, allowed="0 or more", doc="First column of x."),
            Attribute(name="gate_offset", default=0, least=0, allowed="0 or more", doc="Column of the first gate."),
            Attribute(
                name="gate_size",
                default=0,
                least=0,
                allowed="0, or a divisor of O",
                doc="Gates of a row; 0: O of them.",
            ),
            EPSILON,
        ),
        params_header="gate_params.h",
    ),
    Operator(
        name="DeltaGates",
        doc="The gates of the gated delta rule, in float32: decay = -exp(a_log) * softplus(d + dt_bias) and beta = "
        "beta_scale * sigmoid(b), of Hv columns d and b of wider rows.",
        inputs=(
            Port(name="decay_rows", shape="[T, X]", type=ELEMENT, doc="Rows that hold d."),
            Port(name="beta_rows", shape="[T, Y]", type=ELEMENT, doc="Rows that hold b."),
            Port(name="a_log", shape="[Hv]", type=ELEMENT, doc="Logarithm of each head's rate."),
            Port(name="dt_bias", shape="[Hv]", type=ELEMENT, doc="Added to d."),
        ),
        outputs=(
            Port(name="decay", shape="[T, Hv]", type=FLOAT, doc="Logarithm of the state's factor."),
            Port(name="beta", shape="[T, Hv]", type=FLOAT, doc="How much of a new value is written."),
        ),
        attributes=(
            Attribute(name="decay_offset", default=0, least=0, allowed="0 or more", doc="Column of the first d."),
            Attribute(name="beta_offset", default=0, least=0, allowed="0 or more", doc="Column of the first b."),
            Attribute(name="beta_scale", default=1.0, allowed="any finite number", doc="Multiplies beta."),
        ),
        params_header="gate_params.h",
    ),
)
