"""The page pools of an engine, as its core uses them: captured queries, evictions, saved sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.runtime.caches.captures import Captures
from ortolan.runtime.caches.plan import CachePlan
from ortolan.runtime.caches.store import CacheStore, SequenceCaches
from ortolan.runtime.engine.sequence import TokenSequence
from ortolan.runtime.eviction.evictor import NO_SCORES, evict
from ortolan.runtime.eviction.graphs import EvictionGraphs
from ortolan.runtime.eviction.piece_scores import PieceScores
from ortolan.runtime.saved.fingerprint import Fingerprint
from ortolan.runtime.saved.reader import SavedSequence
from ortolan.runtime.saved.state import SavedParts
from ortolan.runtime.saved.writer import save_sequence
from ortolan.runtime.steps.forgotten import read_and_forget
from ortolan.runtime.steps.row import Row
from ortolan.runtime.steps.stepper import Stepper


class PoolCaches:
    """Pools in a store."""

    def __init__(
        self,
        store: CacheStore,
        plan: CachePlan,
        graphs: EvictionGraphs,
        identify: Callable[[], Fingerprint],
    ) -> None:
        self._store, self._plan, self._graphs, self._identify = store, plan, graphs, identify

    @property
    def bytes(self) -> int:
        """Bytes of all page pools."""
        return self._store.bytes

    def make_captures(self, sequence: TokenSequence) -> Captures:
        """Allocate what takes queries; zeros, which favour no position, where fewer will be read than it takes.

        Raises:
            CapacityError: there is no memory.
        """
        assert sequence.eviction is not None
        rows = min(sequence.eviction.captured_queries, self._plan.max_context)
        captures = self._store.make_captures(rows)
        if sequence.prompt_length - sequence.fed < rows:
            with self._store.buffers.scope():
                for capture in captures.values():
                    capture[:] = 0
        return captures

    def begin(self, sequence: TokenSequence) -> None:
        """Clear what a sequence must find cleared when it reads its first token."""
        SequenceCaches(self._store, sequence.pages).clear(sequence.lengths)

    def copy(self, source: Mapping[str, Sequence[int]], target: Mapping[str, Sequence[int]]) -> None:
        """Copy the contents of pages of rings and states, in their order, as many as both have."""
        names = [kind.name for kind in self._plan.kinds if not kind.grows]
        counts = {name: min(len(source[name]), len(target[name])) for name in names}
        sources, targets = ({name: each[name][:count] for name, count in counts.items()} for each in (source, target))
        SequenceCaches(self._store, targets).copy_from(SequenceCaches(self._store, sources))

    def page_bytes(self, kind: str) -> int:
        """Bytes of a page of one kind, as `read` returns it."""
        return self._store.page_bytes(kind)

    def read(self, kind: str, pages: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Copy what pages of a kind hold to the host: [pages, bytes of a page]."""
        return self._store.read_pages(kind, pages)

    def write(self, kind: str, pages: Sequence[int], contents: npt.NDArray[np.uint8]) -> None:
        """Give pages of a kind what `read` has copied."""
        self._store.write_pages(kind, pages, contents)

    def read_again(self, sequence: TokenSequence, stepper: Stepper) -> int:
        """Read the next piece of a sequence's second reading behind it, and score by it; returns its tokens.

        The sequence has pages for all that a piece can take.

        Raises:
            CapacityError: there is no memory.
            NumericError: the model produced NaN or infinity.
            OrtolanError: ONNX Runtime failed. As with all of these, nothing was evicted.
        """
        assert sequence.eviction is not None
        assert sequence.rereading is not None
        reading, piece = sequence.rereading, sequence.rereading.next
        if reading.scores is None:
            sequence.captures = self._store.make_captures(0)
            caches = SequenceCaches(self._store, sequence.pages, sequence.captures)
            reading.scores = PieceScores(self._graphs.open_score(sequence.eviction), caches)
        captures = self._store.make_captures(piece.end - piece.begin)
        row = Row(
            tokens=sequence.tokens[piece.lead : piece.end],
            logical=sequence.fed,
            pages=sequence.pages,
            variant=sequence.variant,
            physical=sequence.lengths.physical_at(sequence.fed),
            captures=captures,
        )
        read_and_forget(stepper, row, SequenceCaches(self._store, sequence.pages), sequence.lengths, 0)
        reading.scores.add(captures, sequence, piece.length)
        reading.advance()
        return piece.length

    def evict(self, sequence: TokenSequence) -> None:
        """Evict a sequence, and record it in its lengths.

        Raises:
            OrtolanError: the eviction failed, and the sequence's caches are lost.
        """
        assert sequence.eviction is not None
        manifest, lengths = self._store.manifest, sequence.lengths
        caches = SequenceCaches(self._store, sequence.pages, sequence.captures)
        heads = {i: manifest.layers[i].num_kv_heads for i in sequence.captures}
        physical = {i: lengths.physical_of(i, count) for i, count in heads.items()}
        session, reading = self._graphs.open(sequence.eviction), sequence.rereading
        scores = reading.scores.scores if reading and reading.scores else NO_SCORES
        place = (physical, lengths.logical, sequence.variant)
        keep = evict(session, caches, sequence.eviction, *place, scores=scores)
        lengths.record_eviction(keep, heads)

    def load(self, sequence: TokenSequence, saved: SavedSequence) -> None:
        """Fill a sequence's pages with what a file holds. Raises SessionFileError."""
        saved.load_caches(sequence, SequenceCaches(self._store, sequence.pages))

    def save(self, path: Path, sequence: TokenSequence, generation: dict[str, Any] | None) -> None:
        """Write a sequence to a file. Raises as `Session.save` does."""
        parts = SavedParts(
            manifest=self._store.manifest,
            plan=self._plan,
            eviction=sequence.eviction,
            caches=SequenceCaches(self._store, sequence.pages),
            state=sequence,
            lengths=sequence.lengths,
            capture_rows=0,
            generation=generation,
            finish_reason=None,
        )
        save_sequence(path, parts, self._identify(), 0)
