"""The operators of layers with a recurrent state, as `ortolan.custom_ops.schema` lists them."""

from __future__ import annotations

import dataclasses

from ortolan.custom_ops.schema_parts import ELEMENT, FLOAT, INT32, QUERY_START, SCALE, Attribute, Operator, Port

_PAST_LEN = Port(name="past_len", shape="[B]", type=INT32, doc="Tokens of each sequence before the step.")
_STATE_SLOT = Port(
    name="state_slot",
    shape="[B]",
    type=INT32,
    doc="Row of the state buffers that each sequence owns; absent: sequence b owns row b.",
    optional=True,
)
_CONV_STATE = Port(
    name="conv_state",
    shape="[N, Rc, F]",
    type=ELEMENT,
    doc="Ring of the last inputs: that of position p lies in row p mod Rc; Rc is at least K - 1.",
)
_STATES = (
    Port(name="state", shape="[N, Hv, Dk, Dv]", type=FLOAT, doc="S after state_len tokens."),
    Port(
        name="recent_keys",
        shape="[N, R, Hk, Dk]",
        type=FLOAT,
        doc="Keys of the last tokens, normalised; that of position p lies in row p mod R. R is 1 to 16.",
    ),
    Port(name="recent_updates", shape="[N, R, Hv, Dv]", type=FLOAT, doc="Their u."),
    Port(name="recent_decays", shape="[N, R, Hv]", type=FLOAT, doc="Their decay."),
    Port(name="state_len", shape="[N]", type=INT32, doc="Tokens that each row of state has read."),
)
_FIRST_STATE = 5


def _state_outputs() -> tuple[Port, ...]:
    return tuple(
        dataclasses.replace(port, name=f"{port.name}_out", doc="The same, after the step.", alias=_FIRST_STATE + index)
        for index, port in enumerate(_STATES)
    )


RECURRENT_OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="CausalConv",
        doc="Convolves each feature with its last K inputs: y[t] = activation(bias + the sum over k, in order, of "
        "weight[:, k] * input[t - K + 1 + k]), in float32. Inputs before a sequence's first position count as 0, "
        "whatever the ring holds. A token's result has the same bits however its sequence was cut into steps. A "
        "sequence goes back by a smaller past_len, by at most Rc - K + 1 positions of a step. A step of so many tokens "
        "at most can be repeated: it leaves the same bits.",
        inputs=(
            Port(name="x", shape="[T, F]", type=ELEMENT, doc="Inputs of this step."),
            Port(name="weight", shape="[F, K]", type=ELEMENT, doc="Taps, oldest first; K is 2 to 8."),
            _CONV_STATE,
            QUERY_START,
            _PAST_LEN,
            Port(name="bias", shape="[F]", type=ELEMENT, doc="Added to the sum.", optional=True),
            _STATE_SLOT,
        ),
        outputs=(
            Port(name="y", shape="[T, F]", type=ELEMENT, doc="The result."),
            dataclasses.replace(_CONV_STATE, name="conv_state_out", doc="The updated ring.", alias=2),
        ),
        attributes=(
            Attribute(
                name="activation",
                default="silu",
                choices=("silu", "none"),
                enumeration="ConvActivation",
                allowed='"silu" or "none"',
                doc="What the sum goes through.",
            ),
        ),
        params_header="recurrent_params.h",
    ),
    Operator(
        name="GatedDeltaRule",
        doc="The gated delta rule (arXiv 2412.06464) over a float32 state: S_t = exp(decay_t) S_(t-1); u_t = beta_t "
        "(v_t - k_t S_t); S_t += the outer product of k_t and u_t; output_t = scale * q_t S_t. Value head h reads key "
        "head h / (Hv / Hk). Before the first token S is 0, whatever the buffers hold. S before a step is `state` and "
        "the kept updates of positions state_len .. past_len - 1 behind it. A sequence with R tokens or fewer keeps "
        "their updates; to make room, `state` then reads those before position c = max(state_len, past_len + tokens - "
        "R), and state_len becomes c (0 where past_len is 0). So the next step may have any past_len from c to the "
        "sequence's new length, and its bits are those of a run that read only the accepted tokens; the step may be "
        "repeated, too. Steps of R tokens or fewer give a token the same bits, whatever their number of tokens. A "
        "sequence with more tokens leaves S behind all of them in `state`, and none of them can be taken back; on CUDA "
        "its float16 and bfloat16 products are those of chunks of 64 tokens, which round otherwise. A sequence without "
        "tokens stays as it is. Needs state_len <= past_len <= state_len + R, but for past_len = 0; the CPU refuses "
        "others.",
        inputs=(
            Port(name="query", shape="[T, Hk, Dk]", type=ELEMENT, doc="Queries of this step."),
            Port(name="key", shape="[T, Hk, Dk]", type=ELEMENT, doc="Keys of this step; Dk is 1 to 256."),
            Port(name="value", shape="[T, Hv, Dv]", type=ELEMENT, doc="Values of this step; Hv is a multiple of Hk."),
            Port(name="decay", shape="[T, Hv]", type=FLOAT, doc="Logarithm of the state's factor, 0 or less."),
            Port(name="beta", shape="[T, Hv]", type=FLOAT, doc="How much of a new value is written."),
            *_STATES,
            QUERY_START,
            _PAST_LEN,
            _STATE_SLOT,
        ),
        outputs=(
            Port(name="output", shape="[T, Hv, Dv]", type=ELEMENT, doc="What the queries read."),
            *_state_outputs(),
        ),
        attributes=(
            dataclasses.replace(SCALE, doc="Factor of the output; 0 means 1 / sqrt(Dk)."),
            Attribute(
                name="l2_norm",
                default=1,
                least=0,
                most=1,
                allowed="0 or 1",
                doc="1: each query and key row is first divided by sqrt(the sum of its squares + 1e-6).",
            ),
        ),
        workspace=True,
        params_header="recurrent_params.h",
    ),
)
