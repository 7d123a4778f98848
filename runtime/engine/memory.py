"""Counts what holds the bytes of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from ortolan.runtime.engine.core import EngineCore


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes of an engine. `held_bytes`, `kept_bytes` and `free_bytes` add up to `pool_bytes`.

    Attributes:
        pool_bytes: allocated once, for all page pools.
        held_bytes: of pages that requests hold.
        kept_bytes: of pages that nobody holds, kept for prompts that begin as they do.
        free_bytes: of the other pages.
        draft_bytes: besides, what draft models and heads have: caches, held or not, and inputs and outputs of steps.
        host_cache_bytes: besides, copies of prefixes in host memory.
        disk_cache_bytes: copies of prefixes in files.
    """

    pool_bytes: int
    held_bytes: int
    kept_bytes: int
    free_bytes: int
    draft_bytes: int = 0
    host_cache_bytes: int = 0
    disk_cache_bytes: int = 0


def count_memory(core: EngineCore) -> EngineMemory:
    """Count between two steps."""
    scheduler = core.scheduler
    bytes_of = {kind.name: kind.page_bytes for kind in scheduler.plan.kinds}
    pools = scheduler.pools.values()
    return EngineMemory(
        pool_bytes=core.pools.bytes,
        held_bytes=sum(pool.held * bytes_of[pool.name] for pool in pools),
        kept_bytes=sum(pool.kept * bytes_of[pool.name] for pool in pools),
        free_bytes=sum(pool.free * bytes_of[pool.name] for pool in pools),
        draft_bytes=core.drafting.pools.bytes,
        host_cache_bytes=0 if core.archive is None else core.archive.pages.host_bytes,
        disk_cache_bytes=0 if core.archive is None else core.archive.pages.disk_bytes,
    )
