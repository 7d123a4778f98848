"""Draws steps of QkvAttention over caches that hold what came before, and runs it and the two operators that it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import devices
import numpy as np
from fused_cases import Feeds, Outputs, QkvCase, qkv_feeds, qkv_outputs, run_fused

from ortolan.custom_ops.low_bit_cache_reference import quantise

UPDATED = ("key_cache", "value_cache", "key_scale", "value_scale", "capture")
ATTENTION_PORTS = ("query_start", "past_len", "block_table", "sink_logits", "prefix_end")


@dataclass(frozen=True, slots=True, kw_only=True)
class JointCase(QkvCase):
    """Sizes and options of one QkvAttention."""

    window: int = -1
    scale: float = 0.0
    softcap: float = 0.0
    causal: bool = True
    sink_logits: bool = False
    prefix_end: Sequence[int] | None = None

    @property
    def mask(self) -> dict[str, object]:
        """Attributes that SwaAttention has and QkvRopeAppend has not."""
        return {"window": self.window, "scale": self.scale, "softcap": self.softcap, "causal": int(self.causal)}


def joint_feeds(case: JointCase, seed: int = 0) -> Feeds:
    """Draw a step; slots that no earlier position has reached hold NaN, or codes whose scale is NaN."""
    rng, feeds = np.random.default_rng([seed, 1]), qkv_feeds(case, seed)
    past = np.broadcast_to(feeds["past_len"].reshape(len(case.tokens), -1), (len(case.tokens), case.kv_heads))
    for sequence, head in np.ndindex(past.shape):
        slots = np.arange(min(past[sequence, head], case.slots))
        pages = np.full(slots.shape, sequence)
        if case.page_slots:
            pages, slots = feeds["block_table"][sequence, slots // case.page_slots], slots % case.page_slots
        for name in ("key", "value"):
            rows = rng.standard_normal((len(slots), case.size)).astype(devices.element())
            if case.code is not None:
                rows, feeds[f"{name}_scale"][pages, head, slots] = quantise(rows, case.code)
            feeds[f"{name}_cache"][pages, head, slots] = rows
    if case.sink_logits:
        feeds["sink_logits"] = rng.standard_normal(case.heads).astype(np.float32)
    if case.prefix_end is not None:
        feeds["prefix_end"] = np.array(case.prefix_end, np.int32)
    return feeds


def joint_outputs(case: JointCase, feeds: Feeds) -> Outputs:
    """All outputs of QkvAttention."""
    others = qkv_outputs(case, feeds)
    return {"output": others["query"], **others}


def aliases(feeds: Feeds) -> dict[str, str]:
    """The outputs that continue an input, in the input's buffer."""
    return {f"{name}_out": name for name in UPDATED if name in feeds}


def run_joint(case: JointCase, feeds: Feeds, *, in_place: bool = True, **attributes: object) -> Feeds:
    """Run QkvAttention."""
    bound = aliases(feeds) if in_place else {}
    attributes = {**case.attributes, **case.mask, **attributes}
    return run_fused("QkvAttention", feeds, joint_outputs(case, feeds), bound, **attributes)


def run_apart(case: JointCase, feeds: Feeds) -> Feeds:
    """Run QkvRopeAppend, and SwaAttention over the caches that it returns."""
    own = {port: array for port, array in feeds.items() if port not in ("sink_logits", "prefix_end")}
    results = run_fused("QkvRopeAppend", own, qkv_outputs(case, feeds), aliases(feeds), **case.attributes)
    read = {"query": results["query"]} | {port: feeds[port] for port in ATTENTION_PORTS if port in feeds}
    read |= {name: results[f"{name}_out"] for name in UPDATED[:4] if name in feeds}
    ring = {"sink": case.sink, "capacity": case.slots}
    outputs = {"output": (results["query"].shape, results["query"].dtype)}
    return run_fused("SwaAttention", read, outputs, **ring, **case.mask) | results
