"""Runs exported models: caches, prefill in chunks, decode, eviction, sampling."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortolan.policies import Eviction, SnapKv
    from ortolan.runtime.caches.plan import CachePlan, LayerPlan, plan_caches
    from ortolan.runtime.engine.engine import Engine
    from ortolan.runtime.engine.stream import Stream
    from ortolan.runtime.generate.logprobs import TokenLogprobs
    from ortolan.runtime.model import Model, load
    from ortolan.runtime.options import Sampling
    from ortolan.runtime.session import Session
    from ortolan.runtime.speculation.options import DraftModel, MtpHead, PromptLookup, Speculation
    from ortolan.runtime.text.streaming import TextStream

__all__ = [
    "CachePlan",
    "DraftModel",
    "Engine",
    "Eviction",
    "LayerPlan",
    "Model",
    "MtpHead",
    "PromptLookup",
    "Sampling",
    "Session",
    "SnapKv",
    "Speculation",
    "Stream",
    "TextStream",
    "TokenLogprobs",
    "load",
    "plan_caches",
]

_HOMES = {
    "CachePlan": "ortolan.runtime.caches.plan",
    "Engine": "ortolan.runtime.engine.engine",
    "Eviction": "ortolan.policies",
    "LayerPlan": "ortolan.runtime.caches.plan",
    "Model": "ortolan.runtime.model",
    "Sampling": "ortolan.runtime.options",
    "Session": "ortolan.runtime.session",
    "SnapKv": "ortolan.policies",
    "DraftModel": "ortolan.runtime.speculation.options",
    "MtpHead": "ortolan.runtime.speculation.options",
    "PromptLookup": "ortolan.runtime.speculation.options",
    "Speculation": "ortolan.runtime.speculation.options",
    "Stream": "ortolan.runtime.engine.stream",
    "TextStream": "ortolan.runtime.text.streaming",
    "TokenLogprobs": "ortolan.runtime.generate.logprobs",
    "load": "ortolan.runtime.model",
    "plan_caches": "ortolan.runtime.caches.plan",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use: a single session needs no engine, and options need no session."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ortolan.runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
