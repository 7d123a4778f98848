"""What a saved sequence consists of, in a session or in an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ortolan.manifest import Manifest
from ortolan.policies import Eviction
from ortolan.runtime.caches.attention import SlotRuns, slot_runs
from ortolan.runtime.caches.plan import CachePlan
from ortolan.runtime.caches.store import SequenceCaches
from ortolan.runtime.state.lengths import Lengths
from ortolan.runtime.state.sequence import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedParts:
    """All that is known of a sequence besides its model.

    Attributes:
        manifest: of the model.
        plan: of the caches.
        eviction: options; None never evicts.
        caches: of the sequence.
        state: tokens, pages and captured queries.
        lengths: those to save; steps that may be under way count as written.
        capture_rows: rows of the capture buffers.
        generation: the one under way, described; None: there is none to go on with.
        finish_reason: why the last one ended.
    """

    manifest: Manifest
    plan: CachePlan
    eviction: Eviction | None
    caches: SequenceCaches
    state: SequenceState
    lengths: Lengths
    capture_rows: int
    generation: dict[str, Any] | None
    finish_reason: str | None


def capture_runs(first: int, end: int, rows: int) -> SlotRuns:
    """List the rows of the captured queries of positions first .. end, at most the last `rows`."""
    return list(slot_runs(max(first, end - rows), end, rows, 0)) if rows else []
