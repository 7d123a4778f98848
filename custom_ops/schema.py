"""The one table of Ortolan's operators; C++ definitions, onnx schemas, emitters and docs derive from it."""

from __future__ import annotations

from dataclasses import dataclass

ELEMENT = "T1"
INT32 = "tensor(int32)"
INT64 = "tensor(int64)"
FLOAT = "tensor(float)"
ELEMENT_TYPES = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One input or output of an operator.

    Attributes:
        shape: dimension symbols as OPS uses them, e.g. "[T, Hq, D]".
        type: `T1`, or an ONNX type string.
        alias: for an output, the index of the input whose buffer it continues; -1 for none.
        on_host: an input that is read on the host, on every device.
    """

    name: str
    shape: str
    type: str
    doc: str
    optional: bool = False
    alias: int = -1
    on_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """One attribute of an operator, with its default.

    Attributes:
        allowed: the values that the library accepts, in words; it refuses others when a session is made.
    """

    name: str
    default: int | float | str
    allowed: str
    doc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of the domain.

    Attributes:
        cuda_only: no CPU kernel exists; only the fused graph uses such an operator.
    """

    name: str
    doc: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: tuple[Attribute, ...] = ()
    cuda_only: bool = False


def _caches(alias_from: int) -> tuple[Port, Port]:
    """Describe the two cache outputs that continue the inputs from index `alias_from` on."""
    return (
        Port(
            name="key_cache_out",
            shape="[N, Hkv, P, D]",
            type=ELEMENT,
            doc="The updated key cache.",
            alias=alias_from,
        ),
        Port(
            name="value_cache_out",
            shape="[N, Hkv, P, D]",
            type=ELEMENT,
            doc="The updated value cache.",
            alias=alias_from + 1,
        ),
    )


_KEY_CACHE = Port(name="key_cache", shape="[N, Hkv, P, D]", type=ELEMENT, doc="Pool of key pages.")
_VALUE_CACHE = Port(name="value_cache", shape="[N, Hkv, P, D]", type=ELEMENT, doc="Pool of value pages.")
_QUERY_START = Port(
    name="query_start",
    shape="[B+1]",
    type=INT32,
    doc="Sequence b owns the packed rows query_start[b] .. query_start[b+1].",
)
_PAST_LEN = Port(
    name="past_len",
    shape="[B] or [B, Hkv]",
    type=INT32,
    doc="Tokens already in this cache before the step, per sequence or per kv head.",
)
_BLOCK_TABLE = Port(
    name="block_table",
    shape="[B, M]",
    type=INT32,
    doc="Page of each block of slots; absent for a contiguous cache, where sequence b owns page b.",
    optional=True,
)
_SINK = Attribute(
    name="sink", default=0, allowed="0 and more", doc="S: first positions of a sequence, never overwritten."
)
_CAPACITY = Attribute(
    name="capacity",
    default=0,
    allowed="0, or at least S + W (S + 1 where there is no window)",
    doc="C: slots a sequence has; 0 means M * P.",
)
_SCALE = Attribute(name="scale", default=0.0, allowed="0 and more", doc="Factor of the logits; 0 means 1 / sqrt(D).")
_SOFTCAP = Attribute(
    name="softcap", default=0.0, allowed="0 and more", doc="If positive, a logit z becomes softcap * tanh(z / softcap)."
)
_EPSILON = Attribute(name="epsilon", default=1e-6, allowed="0 and more", doc="Added to the mean square of an RMSNorm.")

_CONTRACT: tuple[Operator, ...] = (
    Operator(
        name="RingKvAppend",
        doc="Writes this step's keys and values into their slots of the cache, in place.",
        inputs=(
            Port(name="key", shape="[T, Hkv, D]", type=ELEMENT, doc="Keys of this step, after norm and RoPE."),
            Port(name="value", shape="[T, Hkv, D]", type=ELEMENT, doc="Values of this step."),
            _KEY_CACHE,
            _VALUE_CACHE,
            _QUERY_START,
            _PAST_LEN,
            _BLOCK_TABLE,
        ),
        outputs=_caches(2),
        attributes=(_SINK, _CAPACITY),
    ),
    Operator(
        name="SwaAttention",
        doc="Causal attention, with optional sliding window and sinks, of this step's queries over the cache "
        "that already holds this step's keys.",
        inputs=(
            Port(
                name="query",
                shape="[T, Hq, D]",
                type=ELEMENT,
                doc="Queries of this step, after norm and RoPE.",
            ),
            _KEY_CACHE,
            _VALUE_CACHE,
            _QUERY_START,
            _PAST_LEN,
            _BLOCK_TABLE,
            Port(
                name="sink_logits",
                shape="[Hq]",
                type=FLOAT,
                doc="A learned logit per head that joins the softmax's denominator and has no value.",
                optional=True,
            ),
        ),
        outputs=(
            Port(
                name="output",
                shape="[T, Hq, D]",
                type=ELEMENT,
                doc="Attention output; 0 where nothing is visible.",
            ),
            Port(
                name="lse",
                shape="[Hq, T]",
                type=FLOAT,
                doc="Natural logarithm of the softmax's denominator; -inf where nothing is visible.",
                optional=True,
            ),
        ),
        attributes=(
            Attribute(
                name="window",
                default=-1,
                allowed="-1, or 1 and more",
                doc="W: keys a query sees, itself included; -1 for no window.",
            ),
            _SINK,
            _CAPACITY,
            _SCALE,
            _SOFTCAP,
        ),
    ),
    Operator(
        name="SnapKvCapture",
        doc="Keeps the last Wq queries of each sequence: position p goes to row p mod Wq, in place.",
        inputs=(
            Port(
                name="query",
                shape="[T, Hq, D]",
                type=ELEMENT,
                doc="Queries of this step, after norm and RoPE.",
            ),
            Port(name="capture", shape="[B, Wq, Hq, D]", type=ELEMENT, doc="Queries captured so far."),
            _QUERY_START,
            Port(name="past_len", shape="[B]", type=INT32, doc="Tokens of each sequence before the step."),
        ),
        outputs=(
            Port(
                name="capture_out",
                shape="[B, Wq, Hq, D]",
                type=ELEMENT,
                doc="The updated capture buffer.",
                alias=1,
            ),
        ),
    ),
    Operator(
        name="SnapKvScore",
        doc="How much the captured queries attend to each cached position: the mean over queries of their "
        "softmax probabilities, reduced over the query heads of a group; 0 in the window and in empty slots.",
        inputs=(
            Port(name="capture", shape="[B, Wq, Hq, D]", type=ELEMENT, doc="Captured queries."),
            _KEY_CACHE,
            Port(
                name="kv_len",
                shape="[B] or [B, Hkv]",
                type=INT32,
                doc="Tokens in the cache, the captured window included.",
            ),
            _BLOCK_TABLE,
        ),
        outputs=(Port(name="score", shape="[B, Hkv, K]", type=FLOAT, doc="Scores; K is the cache's capacity."),),
        attributes=(
            _SCALE,
            _SOFTCAP,
            Attribute(
                name="group_reduce",
                default="mean",
                allowed='"mean", "max" or "sum"',
                doc="How the scores of the query heads of a group become one.",
            ),
        ),
    ),
    Operator(
        name="KvSelect",
        doc="Chooses the positions that an eviction keeps: sinks and the last `window`, then the best scores, up to "
        "the budget; of equals, those that come first. A position whose score is negative or NaN is never chosen for "
        "it. Fewer sinks and window positions are kept where the budget is smaller: the first ones.",
        inputs=(
            Port(name="score", shape="[B, Hkv or 1, C]", type=FLOAT, doc="Scores; one list serves every kv head."),
            Port(
                name="kv_len",
                shape="[B, Hkv]",
                type=INT32,
                doc="Tokens in the cache; kv heads that share a list hold at least as many as the list chooses from, "
                "which is the least of them.",
            ),
            Port(name="budget", shape="[1]", type=INT64, doc="Positions to keep, 0 and more.", on_host=True),
            Port(name="window", shape="[1]", type=INT64, doc="Last positions, always kept.", on_host=True),
            Port(name="sink", shape="[1]", type=INT64, doc="First positions, always kept.", on_host=True),
        ),
        outputs=(
            Port(
                name="keep",
                shape="[B, Hkv or 1, K]",
                type=INT32,
                doc="Kept positions, strictly ascending; K = min(budget, C), and -1 pads the tail.",
            ),
            Port(name="kept_len", shape="[B, Hkv]", type=INT32, doc="How many each kv head keeps."),
        ),
    ),
    Operator(
        name="KvCompact",
        doc="Moves the kept positions to the front of a full-attention cache, in place.",
        inputs=(
            _KEY_CACHE,
            _VALUE_CACHE,
            Port(
                name="keep",
                shape="[B, Hkv or 1, K]",
                type=INT32,
                doc="Physical positions to keep, strictly ascending; -1 pads the tail.",
            ),
            _BLOCK_TABLE,
        ),
        outputs=_caches(0),
    ),
)

_FUSED: tuple[Operator, ...] = (
    Operator(
        name="FusedLinear",
        doc="A linear layer with what stands around it: y = residual + act(RMSNorm(x) @ weight^T + bias), in float32; "
        "the normalised rows and the result are rounded to T1. With a gated activation the first O rows of weight and "
        "bias are the gate, the last O the factor: act(gate) * factor. One of the two outputs is asked for. In a step "
        "of many tokens that asks for y, the product too is rounded to T1 before its bias and its gate.",
        inputs=(
            Port(name="x", shape="[T, I]", type=ELEMENT, doc="Rows of I features."),
            Port(name="weight", shape="[O, I] or [2 * O, I]", type=ELEMENT, doc="Weight; 2 * O rows if gated."),
            Port(
                name="norm_weight",
                shape="[I]",
                type=ELEMENT,
                doc="Weight of an RMSNorm of x; absent: x is used as it is.",
                optional=True,
            ),
            Port(name="bias", shape="[O] or [2 * O]", type=ELEMENT, doc="Added to the product.", optional=True),
            Port(name="residual", shape="[T, O]", type=ELEMENT, doc="Added to the result.", optional=True),
        ),
        outputs=(
            Port(name="y", shape="[T, O]", type=ELEMENT, doc="The result.", optional=True),
            Port(
                name="y_float32",
                shape="[T, O]",
                type=FLOAT,
                doc="The result, not rounded to T1.",
                optional=True,
            ),
        ),
        attributes=(
            _EPSILON,
            Attribute(
                name="activation",
                default="none",
                allowed='"none", "silu_mul", "gelu_mul" (erf) or "gelu_tanh_mul"',
                doc="Gated activation.",
            ),
        ),
        cuda_only=True,
    ),
    Operator(
        name="QkvRopeAppend",
        doc="From the joint projection to attention: RMSNorm of each query and key head, RoPE (rotate-half, as ONNX's "
        "RotaryEmbedding with interleaved = 0), RingKvAppend of keys and values, and SnapKvCapture of queries, in "
        "float32 and rounded once.",
        inputs=(
            Port(
                name="qkv",
                shape="[T, (Hq + 2 * Hkv) * D]",
                type=ELEMENT,
                doc="Query heads, then key heads, then value heads of each token.",
            ),
            _KEY_CACHE,
            _VALUE_CACHE,
            _QUERY_START,
            _PAST_LEN,
            _BLOCK_TABLE,
            Port(
                name="query_norm_weight",
                shape="[D]",
                type=ELEMENT,
                doc="Weight of the query heads' RMSNorm; absent: no norm.",
                optional=True,
            ),
            Port(
                name="key_norm_weight",
                shape="[D]",
                type=ELEMENT,
                doc="Weight of the key heads' RMSNorm; absent: no norm.",
                optional=True,
            ),
            Port(
                name="cosine",
                shape="[1, T, R]",
                type=FLOAT,
                doc="Cosines of the tokens' angles; the first 2 * R elements of a head are rotated. Absent: no RoPE.",
                optional=True,
            ),
            Port(
                name="sine",
                shape="[1, T, R]",
                type=FLOAT,
                doc="Sines, with cosine.",
                optional=True,
            ),
            Port(
                name="capture",
                shape="[B, Wq, Hq, D]",
                type=ELEMENT,
                doc="Queries captured so far; absent: none are captured.",
                optional=True,
            ),
            Port(
                name="capture_past_len",
                shape="[B]",
                type=INT32,
                doc="With capture: tokens of each sequence before the step.",
                optional=True,
            ),
        ),
        outputs=(
            Port(name="query", shape="[T, Hq, D]", type=ELEMENT, doc="Queries, ready for attention."),
            *_caches(1),
            Port(
                name="capture_out",
                shape="[B, Wq, Hq, D]",
                type=ELEMENT,
                doc="The updated capture buffer.",
                optional=True,
                alias=10,
            ),
        ),
        attributes=(
            Attribute(name="num_heads", default=0, allowed="a multiple of Hkv", doc="Hq: query heads."),
            _EPSILON,
            _SINK,
            _CAPACITY,
        ),
        cuda_only=True,
    ),
    Operator(
        name="RmsNormAdd",
        doc="A norm after a branch, and its residual: y = residual + RMSNorm(x), in float32 and rounded once.",
        inputs=(
            Port(name="x", shape="[T, I]", type=ELEMENT, doc="The branch."),
            Port(name="norm_weight", shape="[I]", type=ELEMENT, doc="Weight of the RMSNorm."),
            Port(name="residual", shape="[T, I]", type=ELEMENT, doc="Added to the norm."),
        ),
        outputs=(Port(name="y", shape="[T, I]", type=ELEMENT, doc="The sum."),),
        attributes=(_EPSILON,),
        cuda_only=True,
    ),
)

OPERATORS: tuple[Operator, ...] = _CONTRACT + _FUSED
