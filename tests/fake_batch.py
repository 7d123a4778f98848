"""A model whose logits are a digest of what the pages of a sequence hold: any mix-up of sequences changes tokens."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from ortolan import Engine, Eviction
from ortolan.errors import ConfigError, OrtolanError
from ortolan.manifest import LayerInfo, Manifest, cache_kinds
from ortolan.runtime.caches.plan import STEPS_AHEAD, CachePlan, plan_pools, rope_variant
from ortolan.runtime.engine.core import EngineCore
from ortolan.runtime.engine.engine import EngineParts
from ortolan.runtime.engine.scheduler import Scheduler
from ortolan.runtime.engine.sequence import TokenSequence
from ortolan.runtime.steps.cuts import ANYWHERE, Cuts
from ortolan.runtime.steps.host import host_result
from ortolan.runtime.steps.kept_result import KeptResult
from ortolan.runtime.steps.row import Row
from ortolan.runtime.text.tokenizer import Detokenize

VOCABULARY = 60
WINDOW = 10
SINK = 2
PAGE_SIZE = 16
NUMBERLESS = 58  # a token whose logits are NaN
BREAKING = 59  # a token that no step survives
UNWRITTEN = -7


def family_mark(count: int) -> int:
    """Return what is added to each token that was read in a step of `count` tokens of its sequence."""
    return VOCABULARY * ((count > 16) + (count > 64))


def make_manifest(*, rings: bool, eos: tuple[int, ...] = (), rope_limits: tuple[int, ...] = (256,)) -> Manifest:
    """Describe a paged model of one full-attention layer and, where asked for, one sliding-window layer."""
    layers = [LayerInfo(window=-1, num_heads=1, num_kv_heads=1, head_size=8, evictable=True)]
    if rings:
        layers.append(LayerInfo(window=WINDOW, num_heads=1, num_kv_heads=1, head_size=8, evictable=False))
    return Manifest(
        architecture="fake",
        dtype="float32",
        vocab_size=VOCABULARY,
        max_context=256,
        chunk_size=24,
        sink=SINK,
        snapkv_window=8,
        paged=True,
        page_size=PAGE_SIZE,
        cache_kinds=cache_kinds(layers),
        layers=tuple(layers),
        rope_limits=rope_limits,
        eos_token_ids=eos,
    )


def digest_logits(full: Sequence[int], ring: Sequence[int], variant: int) -> np.ndarray:
    """Return logits [V] that depend on all of the arguments."""
    data = b"|".join(np.asarray(part, np.int64).tobytes() for part in (full, ring, [variant]))
    seed = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    logits = np.random.default_rng(seed).standard_normal(VOCABULARY).astype(np.float32)
    logits[[NUMBERLESS, BREAKING]] = -100
    return logits


def keep_of(count: int, options: Eviction) -> list[int]:
    """Return the positions that the fake eviction keeps: the first and the last."""
    return [*range(options.sink), *range(count - options.budget + options.sink, count)]


class FakePages:
    """The page pools: a token in each slot."""

    def __init__(self, manifest: Manifest, plan: CachePlan) -> None:
        self.plan, self._sink = plan, manifest.sink
        self._kinds = {kind.name: kind for kind in plan.kinds}
        self._slots = {k.name: np.full((k.num_pages, plan.page_size), UNWRITTEN, np.int64) for k in plan.kinds}

    def write(self, name: str, pages: Sequence[int], position: int, token: int) -> None:
        """Put a token where a position belongs."""
        self._slots[name][self._place(name, pages, position)] = token

    def read(self, name: str, pages: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Return the tokens of positions, which must have been written."""
        tokens = [int(self._slots[name][self._place(name, pages, p)]) for p in positions]
        assert UNWRITTEN not in tokens, "an empty slot is read"
        return tokens

    def copy(self, name: str, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages, as many as both have."""
        for left, right in zip(source, target, strict=False):
            self._slots[name][right] = self._slots[name][left]

    def forget(self, name: str, pages: Sequence[int]) -> None:
        """Empty pages."""
        self._slots[name][list(pages)] = UNWRITTEN

    def _place(self, name: str, pages: Sequence[int], position: int) -> tuple[int, int]:
        size, sink = self.plan.page_size, self._sink
        capacity = self._kinds[name].table_pages * size
        slot = position if position < sink else sink + (position - sink) % (capacity - sink)
        return pages[slot // size], slot % size


class FakeStepper:
    """Writes tokens into pages and reads them back, slot by slot, as the operators do with keys."""

    def __init__(self, pages: FakePages, *, runs_ahead: bool = False, has_families: bool = False) -> None:
        self._pages, self._has_families = pages, has_families
        self.depth = STEPS_AHEAD if runs_ahead else 0
        self.bytes = 0
        self.batches: list[list[int]] = []  # tokens of each row of each step
        self.failure: BaseException | None = None  # what the next step raises
        self.fail_packed: set[int] = set()  # steps, counted from 1, that fail where they have several rows
        self.fed: list[int] = []  # what the last step chose, by row
        self.is_closed = False

    def run(self, rows: Sequence[Row]) -> KeptResult:
        """Feed tokens."""
        sources = [None if row.source is None else [max(0, self.fed[row.source])] for row in rows]
        rows = [
            dataclasses.replace(row, tokens=source or row.tokens) for row, source in zip(rows, sources, strict=True)
        ]
        assert all(token >= 0 for row in rows for token in row.tokens)
        self.batches.append([len(row.tokens) for row in rows])
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        if len(rows) > 1 and len(self.batches) in self.fail_packed:
            raise OrtolanError("too many rows")
        if any(BREAKING in row.tokens for row in rows):
            raise OrtolanError("the decoder graph failed")
        result = host_result(rows, np.concatenate([self._feed(row) for row in rows]))
        self.fed = result.tokens()
        return result

    def capture(self, row: Row) -> None:
        """Return None: there is nothing to make ready."""

    def is_ready(self, row: Row) -> bool:
        """Say yes."""
        return True

    def close(self) -> None:
        """Take note of it."""
        self.is_closed = True

    def _feed(self, row: Row) -> np.ndarray:
        physical = int(row.physical[0][0]) if 0 in row.physical else row.logical
        firsts = {kind.name: physical if kind.grows else row.logical for kind in self._pages.plan.kinds}
        mark = family_mark(len(row.tokens)) if self._has_families else 0
        for name, first in firsts.items():
            for offset, token in enumerate(row.tokens):
                self._pages.write(name, row.pages[name], first + offset, token + mark)
        return np.stack([self._logits(row, firsts, count) for count in self._counts(row)])

    @staticmethod
    def _counts(row: Row) -> range:
        """Return how many of a row's tokens each of its logit rows sees."""
        return range(len(row.tokens) - len(row.draws) + 1, len(row.tokens) + 1)

    def _logits(self, row: Row, firsts: dict[str, int], count: int) -> np.ndarray:
        """Read what the last of a row's first `count` tokens sees."""
        if NUMBERLESS in row.tokens[:count]:
            return np.full(VOCABULARY, np.nan, np.float32)
        history = {}
        for kind in self._pages.plan.kinds:
            end = firsts[kind.name] + count
            oldest = 0 if kind.grows else max(0, end - kind.window)
            history[kind.name] = self._pages.read(kind.name, row.pages[kind.name], range(oldest, end))
        return digest_logits(history["full"], history.get(f"window_{WINDOW}", []), row.variant)


class FakeSaved:
    """A file of a sequence that has read tokens, and evicted them where it has options for that."""

    def __init__(self, tokens: Sequence[int], options: Eviction | None = None) -> None:
        self.tokens, self.options = list(tokens), options
        self.closed = 0

    @property
    def full(self) -> list[int]:
        """What full-attention caches hold."""
        count = len(self.tokens)
        return self.tokens if self.options is None else [self.tokens[i] for i in keep_of(count, self.options)]

    def fill(self, sequence: TokenSequence, rope_limits: Sequence[int]) -> None:
        """Let a sequence without tokens begin with those of the file, as an engine does."""
        count = len(self.tokens)
        sequence.tokens[:0] = self.tokens
        sequence.lengths.logical = sequence.lengths.highest = count
        sequence.is_stored, sequence.variant = True, rope_variant(rope_limits, count)
        if self.options is not None:
            sequence.lengths.counts = {0: np.array([len(self.full)], np.int32)}
            sequence.lengths.evicted_at = count
            sequence.is_unrepeatable = True

    def close(self) -> None:
        """Count how often this is called."""
        self.closed += 1


class FakePools:
    """What an engine does with the pages besides steps."""

    def __init__(self, pages: FakePages) -> None:
        self._pages = pages
        self.bytes = pages.plan.bytes
        self.begun = 0

    def make_captures(self, sequence: TokenSequence) -> dict[int, np.ndarray]:
        """Allocate what nothing is written to."""
        return {0: np.zeros((1, sequence.eviction.captured_queries, 1, 8), np.float32)}

    def begin(self, sequence: TokenSequence) -> None:
        """Empty a sequence's pages, which hold nothing that it may read."""
        assert sequence.fed == 0
        self.begun += 1
        for name, pages in sequence.pages.items():
            self._pages.forget(name, pages)

    def copy(self, source: dict[str, list[int]], target: dict[str, list[int]]) -> None:
        """Copy what is written over."""
        for kind in self._pages.plan.kinds:
            if not kind.grows:
                self._pages.copy(kind.name, source[kind.name], target[kind.name])

    def evict(self, sequence: TokenSequence) -> None:
        """Keep what `keep_of` says."""
        pages, lengths = sequence.pages["full"], sequence.lengths
        held = self._pages.read("full", pages, range(lengths.held(0)))
        keep = keep_of(len(held), sequence.eviction)
        for slot, position in enumerate(keep):
            self._pages.write("full", pages, slot, held[position])
        lengths.record_eviction({0: np.array([keep], np.int32)}, {0: 1})

    def load(self, sequence: TokenSequence, saved: FakeSaved) -> None:
        """Write a file's tokens."""
        assert not saved.closed
        for kind in self._pages.plan.kinds:
            first = 0 if kind.grows else max(0, len(saved.tokens) - kind.window)
            for position, token in enumerate((saved.full if kind.grows else saved.tokens)[first:], first):
                self._pages.write(kind.name, sequence.pages[kind.name], position, token)

    def save(self, path: Path, sequence: TokenSequence, generation: object) -> None:
        """Refuse: these tests have no files."""
        raise AssertionError("nothing is saved here")


def make_core(
    manifest: Manifest, pages: int = 64, overcommit: float = 1.0, *, runs_ahead: bool = False, **options: int
) -> EngineCore:
    """Make the core of an engine of that many full-attention pages."""
    memory = FakePages(manifest, make_plan(manifest, pages, **options))
    return EngineCore(Scheduler(memory.plan, overcommit), FakeStepper(memory, runs_ahead=runs_ahead), FakePools(memory))


def make_engine(
    manifest: Manifest,
    pages: int = 64,
    overcommit: float = 1.0,
    *,
    runs_ahead: bool = False,
    has_families: bool = False,
    cuts: Cuts = ANYWHERE,
    detokenize: Detokenize | None = None,
    **options: int,
) -> Engine:
    """Make an engine of that many full-attention pages; `has_families`: tokens keep which kernels have read them."""
    plan = dataclasses.replace(make_plan(manifest, pages, **options), cuts=cuts)
    memory = FakePages(manifest, plan)
    parts = EngineParts(
        manifest=manifest,
        plan=memory.plan,
        stepper=FakeStepper(memory, runs_ahead=runs_ahead, has_families=has_families),
        pools=FakePools(memory),
        check_eviction=lambda options: None,
        detokenize=detokenize or _no_tokenizer,
        identify=dict,
        batch_invariant=False,
        prepare_drafter=lambda speculation, drafts: lambda: speculation.join(None, drafts),
    )
    return Engine.of(parts, overcommit)


def _no_tokenizer(context: Sequence[int]) -> NoReturn:
    raise ConfigError("there is no tokenizer")


def expected_tokens(
    manifest: Manifest,
    prompt: Sequence[int],
    count: int,
    snapkv: Eviction | None = None,
    saved: FakeSaved | None = None,
    *,
    has_families: bool = False,
) -> list[int]:
    """Continue a prompt alone, greedily, by the definition of the fake model; it may follow the tokens of a file.

    With families, the prompt is read whole and each token after it alone.
    """
    before = saved.tokens if saved else []
    tokens = [*before, *prompt]
    kept, evicted_at = (saved.full, len(before)) if saved and saved.options else ([], 0)
    known, has_rings = len(tokens), len(manifest.layers) > 1
    mark = family_mark(known) if has_families else 0
    for _ in range(count):
        marked = [token + mark for token in tokens[:known]] + tokens[known:]
        full = kept + marked[evicted_at:]
        variant = rope_variant(manifest.rope_limits, len(tokens))
        logits = digest_logits(full, marked[-WINDOW:] if has_rings else [], variant)
        if snapkv is not None and len(tokens) == known and len(full) > snapkv.budget:
            kept, evicted_at = [full[i] for i in keep_of(len(full), snapkv)], known
        tokens.append(int(np.argmax(logits)))
    return tokens[known:]


def make_plan(manifest: Manifest, pages: int, *, max_sequences: int = 4, chunk_tokens: int = 24) -> CachePlan:
    """Plan pools with a given number of full-attention pages."""
    plan = plan_pools(manifest, max_sequences, None, chunk_tokens)
    kinds = [dataclasses.replace(kind, num_pages=pages) if kind.grows else kind for kind in plan.kinds]
    return dataclasses.replace(plan, kinds=tuple(kinds))
