"""Eviction policies, one file each: which positions of a full-attention cache a budget keeps.

A policy is a class derived from `Eviction`: its options are the fields, its needs are properties, and `keep` builds
its graph. A new policy is a new file and a line of `POLICIES`.
"""

from __future__ import annotations

from ortolan.policies.adakv import AdaKv
from ortolan.policies.eviction import STRUCTURE_METADATA, Eviction
from ortolan.policies.expected import ExpectedAttention
from ortolan.policies.kvzip import KvZip
from ortolan.policies.pyramidkv import PyramidKv
from ortolan.policies.snapkv import SnapKv
from ortolan.policies.streaming import Streaming

POLICIES: dict[str, type[Eviction]] = {
    "snapkv": SnapKv,
    "streaming": Streaming,
    "pyramidkv": PyramidKv,
    "adakv": AdaKv,
    "expected": ExpectedAttention,
    "kvzip": KvZip,
}

__all__ = ["POLICIES", "STRUCTURE_METADATA", "Eviction", "SnapKv"]
