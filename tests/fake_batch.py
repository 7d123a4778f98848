"""A model whose logits are a digest of what the pages of a sequence hold: any mix-up of sequences changes tokens."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from ortolan import SnapKv
from ortolan.errors import OrtolanError
from ortolan.manifest import LayerInfo, Manifest, cache_kinds
from ortolan.runtime.batch_inputs import Row
from ortolan.runtime.batch_stepper import HostResult
from ortolan.runtime.engine_plan import EnginePlan, plan_engine

VOCABULARY = 60
WINDOW = 10
SINK = 2
PAGE_SIZE = 16
NUMBERLESS = 58  # a token whose logits are NaN
BREAKING = 59  # a token that no step survives
UNWRITTEN = -7


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


def keep_of(count: int, options: SnapKv) -> list[int]:
    """Return the positions that the fake eviction keeps: the first and the last."""
    return [*range(options.sink), *range(count - options.budget + options.sink, count)]


class FakeStepper:
    """Writes tokens into pages and reads them back, slot by slot, as the operators do with keys."""

    def __init__(self, manifest: Manifest, plan: EnginePlan) -> None:
        self._plan = plan
        self._pages = {k.name: np.full((k.num_pages, plan.page_size), UNWRITTEN, np.int64) for k in plan.kinds}
        self._sink = manifest.sink
        self.batches: list[list[int]] = []  # tokens of each row of each step
        self.cache_bytes = plan.bytes
        self.fail_next = False
        self.fail_packed: set[int] = set()  # steps, counted from 1, that fail where they have several rows
        self.runs_ahead = False
        self.fed: list[int] = []  # what the last step chose, by row

    def run(self, rows: Sequence[Row]) -> HostResult:
        """Feed tokens."""
        sources = [None if row.source is None else [max(0, self.fed[row.source])] for row in rows]
        rows = [
            dataclasses.replace(row, tokens=source or row.tokens) for row, source in zip(rows, sources, strict=True)
        ]
        assert all(token >= 0 for row in rows for token in row.tokens)
        self.batches.append([len(row.tokens) for row in rows])
        if self.fail_next:
            self.fail_next = False
            raise ValueError("a bug")
        if len(rows) > 1 and len(self.batches) in self.fail_packed:
            raise OrtolanError("too many rows")
        if any(BREAKING in row.tokens for row in rows):
            raise OrtolanError("the decoder graph failed")
        result = HostResult(rows, np.stack([self._feed(row) for row in rows]))
        self.fed = result.tokens()
        return result

    def close(self) -> None:
        """Do nothing."""

    def make_captures(self, window: int) -> dict[int, np.ndarray]:
        """Allocate what nothing is written to."""
        return {0: np.zeros((1, window, 1, 8), np.float32)}

    def evict(self, row: Row, options: SnapKv) -> dict[int, np.ndarray]:
        """Keep what `keep_of` says."""
        held = self._read("full", row, range(row.logical))
        keep = keep_of(row.logical, options)
        for slot, position in enumerate(keep):
            self._write("full", row, slot, held[position])
        return {0: np.array([len(keep)], np.int32)}

    def _feed(self, row: Row) -> np.ndarray:
        physical = int(row.physical[0][0]) if 0 in row.physical else row.logical
        end = row.logical + len(row.tokens)
        history = {}
        for kind in self._plan.kinds:
            first = row.logical if kind.is_ring else physical
            for offset, token in enumerate(row.tokens):
                self._write(kind.name, row, first + offset, token)
            oldest = max(0, end - kind.window) if kind.is_ring else 0
            history[kind.name] = self._read(kind.name, row, range(oldest, first + len(row.tokens)))
        if NUMBERLESS in row.tokens:
            return np.full(VOCABULARY, np.nan, np.float32)
        return digest_logits(history["full"], history.get(f"window_{WINDOW}", []), row.variant)

    def _place(self, name: str, row: Row, position: int) -> tuple[int, int]:
        size = self._plan.page_size
        kind = next(k for k in self._plan.kinds if k.name == name)
        capacity = kind.table_pages * size
        sink = self._sink
        slot = position if position < sink else sink + (position - sink) % (capacity - sink)
        return row.pages[name][slot // size], slot % size

    def _write(self, name: str, row: Row, position: int, token: int) -> None:
        self._pages[name][self._place(name, row, position)] = token

    def _read(self, name: str, row: Row, positions: Sequence[int]) -> list[int]:
        tokens = [int(self._pages[name][self._place(name, row, p)]) for p in positions]
        assert UNWRITTEN not in tokens, "an empty slot is read"
        return tokens


def expected_tokens(manifest: Manifest, prompt: Sequence[int], count: int, snapkv: SnapKv | None = None) -> list[int]:
    """Continue a prompt alone, greedily, by the definition of the fake model."""
    tokens, kept, evicted_at = list(prompt), list(prompt), 0
    has_rings = len(manifest.layers) > 1
    for _ in range(count):
        full = kept + tokens[evicted_at:] if evicted_at else tokens
        variant = next(i for i, limit in enumerate(manifest.rope_limits) if limit >= len(tokens))
        logits = digest_logits(full, tokens[-WINDOW:] if has_rings else [], variant)
        if snapkv is not None and not evicted_at and len(prompt) > snapkv.budget:
            kept, evicted_at = [prompt[i] for i in keep_of(len(prompt), snapkv)], len(prompt)
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]


def make_plan(manifest: Manifest, pages: int, *, max_sequences: int = 4, chunk_tokens: int = 24) -> EnginePlan:
    """Plan pools with a given number of full-attention pages."""
    generous = plan_engine(manifest, max_sequences, None, chunk_tokens)
    rings = sum(kind.bytes for kind in generous.kinds if kind.is_ring)
    page_bytes = next(kind.page_bytes for kind in generous.kinds if not kind.is_ring)
    return plan_engine(manifest, max_sequences, rings + pages * page_bytes, chunk_tokens)
