"""Eviction policies, one file each: which positions a budget keeps.

A policy is a function from the parts of an eviction graph to what is kept of each evictable layer. A new policy is a
new file and a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ortolan.graphs.evict_parts import EvictParts, Kept
from ortolan.graphs.policies.adakv import keep_adakv
from ortolan.graphs.policies.expected import keep_expected
from ortolan.graphs.policies.pyramidkv import keep_pyramidkv
from ortolan.graphs.policies.snapkv import keep_snapkv
from ortolan.graphs.policies.streaming import keep_streaming

Policy: TypeAlias = Callable[[EvictParts], dict[int, Kept]]

POLICIES: dict[str, Policy] = {
    "snapkv": keep_snapkv,
    "streaming": keep_streaming,
    "pyramidkv": keep_pyramidkv,
    "adakv": keep_adakv,
    "expected": keep_expected,
}
