"""The one table of Ortolan's operators; C++ definitions, onnx schemas, emitters and docs derive from it."""

from __future__ import annotations

import dataclasses

from ortolan.custom_ops.expert_schema import EXPERT_OPERATORS
from ortolan.custom_ops.fused_schema import FUSED_OPERATORS
from ortolan.custom_ops.low_bit_schema import LOW_BIT_OPERATORS
from ortolan.custom_ops.recurrent_schema import RECURRENT_OPERATORS
from ortolan.custom_ops.schema_parts import (
    ATTENDED,
    BLOCK_TABLE,
    CAPACITY,
    CAPTURE_OUT,
    CAUSAL,
    ELEMENT,
    FLOAT,
    INT32,
    INT64,
    KEY_CACHE,
    KEY_SCALE,
    MAX_QUERY_LEN,
    PAST_LEN,
    PREFIX_END,
    QUERY,
    QUERY_START,
    SCALE,
    SINK,
    SINK_LOGITS,
    SOFTCAP,
    VALUE_CACHE,
    VALUE_SCALE,
    WINDOW,
    Attribute,
    Operator,
    Port,
    cache_outputs,
    scale_outputs,
)

_CONTRACT: tuple[Operator, ...] = (
    Operator(
        name="RingKvAppend",
        doc="Writes this step's keys and values into their slots of the cache, in place. Where the cache is int8 or "
        "float8e4m3fn, it writes codes and scales.",
        inputs=(
            Port(name="key", shape="[T, Hkv, D]", type=ELEMENT, doc="Keys of this step, after norm and RoPE."),
            Port(name="value", shape="[T, Hkv, D]", type=ELEMENT, doc="Values of this step."),
            KEY_CACHE,
            VALUE_CACHE,
            QUERY_START,
            PAST_LEN,
            BLOCK_TABLE,
            KEY_SCALE,
            VALUE_SCALE,
        ),
        outputs=(*cache_outputs(2), *scale_outputs(7)),
        attributes=(SINK, CAPACITY),
    ),
    Operator(
        name="SwaAttention",
        doc="Attention of this step's queries over the cache that already holds this step's keys: causal, with "
        "an optional sliding window, sinks and prefixes; or in both directions.",
        inputs=(
            QUERY,
            KEY_CACHE,
            VALUE_CACHE,
            QUERY_START,
            PAST_LEN,
            BLOCK_TABLE,
            SINK_LOGITS,
            PREFIX_END,
            KEY_SCALE,
            VALUE_SCALE,
            MAX_QUERY_LEN,
        ),
        outputs=(
            ATTENDED,
            Port(
                name="lse",
                shape="[Hq, T]",
                type=FLOAT,
                doc="Natural logarithm of the softmax's denominator; -inf where nothing is visible.",
                optional=True,
            ),
        ),
        attributes=(WINDOW, SINK, CAPACITY, SCALE, SOFTCAP, CAUSAL),
        workspace=True,
    ),
    Operator(
        name="SnapKvCapture",
        doc="Keeps the last Wq queries of each sequence: position p goes to row p mod Wq, in place.",
        inputs=(
            QUERY,
            Port(name="capture", shape="[B, Wq, Hq, D]", type=ELEMENT, doc="Queries captured so far."),
            QUERY_START,
            Port(name="past_len", shape="[B]", type=INT32, doc="Tokens of each sequence before the step."),
        ),
        outputs=(dataclasses.replace(CAPTURE_OUT, alias=1),),
    ),
    Operator(
        name="SnapKvScore",
        doc="How much the captured queries attend to each cached position: the mean or the largest of their softmax "
        "probabilities, reduced over the query heads of a group; 0 in the window and in empty slots.",
        inputs=(
            Port(name="capture", shape="[B, Wq, Hq, D]", type=ELEMENT, doc="Captured queries."),
            KEY_CACHE,
            Port(
                name="kv_len",
                shape="[B] or [B, Hkv]",
                type=INT32,
                doc="Tokens in the cache, the captured window included.",
            ),
            BLOCK_TABLE,
            KEY_SCALE,
        ),
        outputs=(Port(name="score", shape="[B, Hkv, K]", type=FLOAT, doc="Scores; K is the cache's capacity."),),
        attributes=(
            SCALE,
            SOFTCAP,
            Attribute(
                name="group_reduce",
                default="mean",
                choices=("mean", "max", "sum"),
                enumeration="GroupReduce",
                allowed='"mean", "max" or "sum"',
                doc="How the scores of the query heads of a group become one.",
            ),
            Attribute(
                name="query_reduce",
                default="mean",
                choices=("mean", "max"),
                enumeration="QueryReduce",
                allowed='"mean" or "max"',
                doc="How the probabilities of the captured queries become one for each query head, before the group.",
            ),
        ),
        workspace=True,
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
            Port(name="budget", shape="[1]", type=INT64, doc="Positions to keep, 0 or more.", on_host=True),
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
            KEY_CACHE,
            VALUE_CACHE,
            Port(
                name="keep",
                shape="[B, Hkv or 1, K]",
                type=INT32,
                doc="Physical positions to keep, strictly ascending; -1 pads the tail.",
            ),
            BLOCK_TABLE,
            KEY_SCALE,
            VALUE_SCALE,
        ),
        outputs=(*cache_outputs(0), *scale_outputs(4)),
    ),
)

OPERATORS: tuple[Operator, ...] = (
    _CONTRACT + EXPERT_OPERATORS + RECURRENT_OPERATORS + LOW_BIT_OPERATORS + FUSED_OPERATORS
)
