"""Runs exported models: caches, prefill in chunks, decode, eviction, sampling."""

from ortolan.runtime.engine import Engine
from ortolan.runtime.model import Model, load
from ortolan.runtime.options import Sampling
from ortolan.runtime.plan import CachePlan, LayerPlan, plan_caches
from ortolan.runtime.session import Session
from ortolan.runtime.stream import Stream
from ortolan.runtime.text import stream_text

__all__ = [
    "CachePlan",
    "Engine",
    "LayerPlan",
    "Model",
    "Sampling",
    "Session",
    "Stream",
    "load",
    "plan_caches",
    "stream_text",
]
