"""What follows the prompt of a request that evicts, in an engine."""

from __future__ import annotations

from ortolan.runtime.caches.captures import Captures
from ortolan.runtime.engine.pool_caches import PoolCaches
from ortolan.runtime.engine.rereading import Rereading
from ortolan.runtime.engine.scheduler import Chunk, Scheduler
from ortolan.runtime.engine.sequence import TokenSequence
from ortolan.runtime.engine.stats import EngineStats
from ortolan.runtime.steps.stepper import Stepper


class Evictions:
    """Evicts behind prompts, after a second reading where the policy asks for one.

    Each method raises OrtolanError where it fails, and the sequence cannot go on.
    """

    def __init__(self, scheduler: Scheduler, pools: PoolCaches, stepper: Stepper, stats: EngineStats) -> None:
        """Count what is done in the `stats` of an engine."""
        self._scheduler, self._pools, self._stepper, self._stats = scheduler, pools, stepper, stats

    def end_prompt(self, sequence: TokenSequence) -> None:
        """Evict a sequence whose prompt has been read, or begin to read that again."""
        reading = sequence.eviction.second_reading if sequence.eviction else None
        if reading is None:
            self._evict(sequence)
        else:
            sequence.rereading = Rereading(sequence.fed, reading, sequence.reread_room)

    def read_again(self, chunk: Chunk) -> None:
        """Read a piece of a prompt again, and evict behind the last."""
        self._stats.reread_tokens += self._pools.read_again(chunk.sequence, self._stepper)
        if chunk.evicts:
            self._evict(chunk.sequence)

    def _evict(self, sequence: TokenSequence) -> None:
        self._pools.evict(sequence)
        sequence.captures, sequence.rereading = Captures(), None
        self._scheduler.release_evicted(sequence)
        self._stats.evictions += 1
