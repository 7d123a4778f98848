"""What operators are described by, and the ports and attributes that several of them share."""

from __future__ import annotations

from dataclasses import dataclass

from ortolan.element_types import CODE_TYPES, COMPUTE_TYPES, element_type

ELEMENT = "T1"
CACHE = "T2"
INT32 = "tensor(int32)"
INT64 = "tensor(int64)"
UINT8 = "tensor(uint8)"
FLOAT = "tensor(float)"
ELEMENT_TYPES = tuple(element_type(name).tensor for name in COMPUTE_TYPES)
CACHE_TYPES = (*ELEMENT_TYPES, *(element_type(name).tensor for name in CODE_TYPES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One input or output of an operator.

    Attributes:
        shape: dimension symbols as OPS uses them, e.g. "[T, Hq, D]".
        type: `T1`, `T2` (of caches: T1 or codes), or an ONNX type string.
        alias: for an output, the index of the input whose buffer it continues; -1 for none.
        spends: for an output, the index of the input whose buffer it takes where nothing reads that input later; -1
            for none.
        on_host: an input that is read on the host, on every device.
    """

    name: str
    shape: str
    type: str
    doc: str
    optional: bool = False
    alias: int = -1
    spends: int = -1
    on_host: bool = False

    @property
    def symbols(self) -> list[str]:
        """The dimension symbols of a shape that has one rank."""
        return [symbol.strip() for symbol in self.shape.strip("[]").split(",")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """One attribute of an operator, with its default.

    The library refuses other values than those allowed when a session is made.

    Attributes:
        allowed: the allowed values, in words.
        symbol: the contract's symbol of the value, for messages.
        least: the smallest allowed number; None for any finite one.
        most: the largest allowed number; None for any finite one.
        nonzero: 0 is not allowed.
        choices: the texts that are allowed; empty for numbers.
        enumeration: the C++ enumeration of the choices, whose values are named after them: kSiluMul for "silu_mul".
    """

    name: str
    default: int | float | str
    allowed: str
    doc: str
    symbol: str = ""
    least: int | None = None
    most: int | None = None
    nonzero: bool = False
    choices: tuple[str, ...] = ()
    enumeration: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of the domain.

    Its kernels are functions of its name in snake case (`cpu::kv_select`, `cuda::kv_select`) that take a struct
    `<Name>Params`, whose fields are named after attributes and ports.

    Attributes:
        workspace: the CUDA kernel asks for scratch memory, by a function `<name>_workspace`.
        params_header: the header of csrc/kernels that holds the params struct.
        sizes: the params struct's field of each dimension symbol. Where it is given, the shapes of the ports are all
            that a call must obey, and reading a call is generated; else there is a `read_params` in csrc/ort.
    """

    name: str
    doc: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: tuple[Attribute, ...] = ()
    workspace: bool = False
    params_header: str = "params.h"
    sizes: tuple[tuple[str, str], ...] = ()


def cache_outputs(alias_from: int) -> tuple[Port, Port]:
    """Describe the two cache outputs that continue the inputs from index `alias_from` on."""
    return (
        Port(name="key_cache_out", shape="[N, Hkv, P, D]", type=CACHE, doc="The updated key cache.", alias=alias_from),
        Port(
            name="value_cache_out",
            shape="[N, Hkv, P, D]",
            type=CACHE,
            doc="The updated value cache.",
            alias=alias_from + 1,
        ),
    )


def scale_outputs(alias_from: int) -> tuple[Port, Port]:
    """Describe the two outputs of scales that continue the inputs from index `alias_from` on."""
    return (
        Port(
            name="key_scale_out",
            shape="[N, Hkv, P]",
            type=FLOAT,
            doc="The updated scales of keys.",
            optional=True,
            alias=alias_from,
        ),
        Port(
            name="value_scale_out",
            shape="[N, Hkv, P]",
            type=FLOAT,
            doc="The updated scales of values.",
            optional=True,
            alias=alias_from + 1,
        ),
    )


QUERY = Port(name="query", shape="[T, Hq, D]", type=ELEMENT, doc="Queries of this step, after norm and RoPE.")
CAPTURE_OUT = Port(name="capture_out", shape="[B, Wq, Hq, D]", type=ELEMENT, doc="The updated capture buffer.")
KEY_CACHE = Port(name="key_cache", shape="[N, Hkv, P, D]", type=CACHE, doc="Pool of key pages.")
VALUE_CACHE = Port(name="value_cache", shape="[N, Hkv, P, D]", type=CACHE, doc="Pool of value pages.")
KEY_SCALE = Port(
    name="key_scale",
    shape="[N, Hkv, P]",
    type=FLOAT,
    doc="Scale of each row of key codes; given exactly where the caches hold codes.",
    optional=True,
)
VALUE_SCALE = Port(
    name="value_scale",
    shape="[N, Hkv, P]",
    type=FLOAT,
    doc="Scale of each row of value codes; given exactly where the caches hold codes.",
    optional=True,
)
QUERY_START = Port(
    name="query_start",
    shape="[B+1]",
    type=INT32,
    doc="Sequence b owns the packed rows query_start[b] .. query_start[b+1].",
)
PAST_LEN = Port(
    name="past_len",
    shape="[B] or [B, Hkv]",
    type=INT32,
    doc="Tokens already in this cache before the step, per sequence or per kv head.",
)
BLOCK_TABLE = Port(
    name="block_table",
    shape="[B, M]",
    type=INT32,
    doc="Page of each block of slots; absent for a contiguous cache, where sequence b owns page b. Entries of slots "
    "that no token has reached may hold anything.",
    optional=True,
)
SINK_LOGITS = Port(
    name="sink_logits",
    shape="[Hq]",
    type=FLOAT,
    doc="A learned logit per head that joins the softmax's denominator and has no value.",
    optional=True,
)
PREFIX_END = Port(
    name="prefix_end",
    shape="[B]",
    type=INT32,
    doc="Positions before it see each other in both directions, whatever the window. Only with causal = 1.",
    optional=True,
)
MAX_QUERY_LEN = Port(
    name="max_query_len",
    shape="[1]",
    type=INT32,
    doc="The caller's promise: no sequence has more tokens in the step. Absent or 0: nothing is promised. It spares "
    "CUDA the kernels for longer chunks; where it is true, no result depends on it. Where it is false, the CPU "
    "provider refuses the step, and on CUDA what the node returns is undefined.",
    optional=True,
    on_host=True,
)
ATTENDED = Port(
    name="output",
    shape="[T, Hq, D]",
    type=ELEMENT,
    doc="Attention output; 0 where nothing is visible.",
)
WINDOW = Attribute(
    name="window",
    symbol="W",
    default=-1,
    least=-1,
    nonzero=True,
    allowed="-1, or 1 or more",
    doc="W: keys a query sees, itself included; -1 for no window.",
)
CAUSAL = Attribute(
    name="causal",
    default=1,
    least=0,
    most=1,
    allowed="0 or 1",
    doc="0: a query sees later keys, too: all of its sequence, or those less than W before or after it, and the sinks.",
)
SINK = Attribute(
    name="sink",
    symbol="S",
    default=0,
    least=0,
    allowed="0 or more",
    doc="S: first positions of a sequence, never overwritten.",
)
CAPACITY = Attribute(
    name="capacity",
    symbol="C",
    default=0,
    least=0,
    allowed="0, or at least S + W (at least S + 1 without a window)",
    doc="C: slots a sequence has; 0 means M * P.",
)
SCALE = Attribute(
    name="scale", default=0.0, least=0, allowed="0 or more", doc="Factor of the logits; 0 means 1 / sqrt(D)."
)
SOFTCAP = Attribute(
    name="softcap",
    default=0.0,
    least=0,
    allowed="0 or more",
    doc="If positive, a logit z becomes softcap * tanh(z / softcap).",
)
EPSILON = Attribute(
    name="epsilon", default=1e-6, least=0, allowed="0 or more", doc="Added to the mean square of an RMSNorm."
)
