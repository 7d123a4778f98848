"""Runs exported models: caches, prefill in chunks, decode, eviction, sampling."""

from ortolan.policies import Eviction, SnapKv
from ortolan.runtime.caches.plan import CachePlan, LayerPlan, plan_caches
from ortolan.runtime.engine.engine import Engine
from ortolan.runtime.engine.stream import Stream
from ortolan.runtime.generate.logprobs import TokenLogprobs
from ortolan.runtime.model import Model, load
from ortolan.runtime.options import Sampling
from ortolan.runtime.session import Session
from ortolan.runtime.text.streaming import stream_text

__all__ = [
    "CachePlan",
    "Engine",
    "Eviction",
    "LayerPlan",
    "Model",
    "Sampling",
    "Session",
    "SnapKv",
    "Stream",
    "TokenLogprobs",
    "load",
    "plan_caches",
    "stream_text",
]
