"""Plans an engine's page pools: how many pages each cache kind gets, and how many one sequence can need."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ortolan.errors import CapacityError, ConfigError, whole_number
from ortolan.manifest import Manifest
from ortolan.runtime.plan import CUDA_TILE, ELEMENT_BYTES, RING_TILE


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPlan:
    """The pool of one cache kind.

    Attributes:
        name: of the kind, as in the manifest.
        window: keys a query sees; -1 for full attention.
        page_size: P, slots of a page.
        table_pages: M, the most pages of one sequence; a ring wraps after that many.
        num_pages: N, pages of the pool.
        page_bytes: keys and values of one page, in all layers of the kind.
    """

    name: str
    window: int
    page_size: int
    table_pages: int
    num_pages: int
    page_bytes: int

    @property
    def is_ring(self) -> bool:
        """Whether a sequence's pages stop growing and are written over."""
        return self.window > 0

    @property
    def bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_pages * self.page_bytes

    def pages_for(self, slots: int) -> int:
        """Return the pages that hold `slots` appended tokens."""
        return min(-(-slots // self.page_size), self.table_pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What an engine allocates, once.

    Attributes:
        max_sequences: most sequences that run at once.
        max_context: longest sequence, tokens.
        chunk_tokens: most tokens of one step, or `max_sequences` where that is more.
        page_size: P.
        kinds: the pool of each cache kind.
        rope_limits: the longest sequence of each RoPE variant, ascending.
    """

    max_sequences: int
    max_context: int
    chunk_tokens: int
    page_size: int
    kinds: tuple[KindPlan, ...]
    rope_limits: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all pools."""
        return sum(kind.bytes for kind in self.kinds)

    @property
    def shares_prefixes(self) -> bool:
        """Whether pages can serve other sequences: a ring's are written over, so only where there is none."""
        return not any(kind.is_ring for kind in self.kinds)

    def sequence_bytes(self, length: int) -> int:
        """Return the bytes of the pages that hold a sequence of `length` tokens, without an eviction."""
        return sum(kind.pages_for(length) * kind.page_bytes for kind in self.kinds)


def plan_engine(
    manifest: Manifest,
    max_sequences: int,
    max_cache_bytes: int | None = None,
    chunk_tokens: int | None = None,
    max_context: int | None = None,
    *,
    cuda: bool = False,
) -> EnginePlan:
    """Divide a number of bytes among the page pools of a model.

    Rings take what `max_sequences` sequences need, or fewer: as many as leave the full-attention pool a quarter
    of `max_context` for each, and room for one sequence of that length. That pool gets the rest, at most what all
    sequences can use.

    Args:
        manifest: of a paged model.
        max_sequences: most sequences that run at once.
        max_cache_bytes: of all pools together; None takes what `max_sequences` of the longest sequences need.
        chunk_tokens: as in `EnginePlan`; None takes the manifest's chunk size.
        max_context: longest sequence; None takes the manifest's.
        cuda: round rings up to whole tiles of the CUDA kernels.

    Raises:
        ConfigError: the model is not paged, a number is below 1, or the context is longer than the export's.
        CapacityError: the bytes hold no page of some kind, or not the ring of a single sequence.
    """
    if not manifest.paged:
        raise ConfigError("this model has contiguous caches; export it with paged=True to serve many sequences")
    max_sequences = whole_number("max_sequences", max_sequences)
    chunk = whole_number("chunk_tokens", manifest.chunk_size if chunk_tokens is None else chunk_tokens)
    context = _checked_context(manifest, manifest.max_context if max_context is None else max_context)
    if max_cache_bytes is not None:
        max_cache_bytes = whole_number("max_cache_bytes", max_cache_bytes)
    page = manifest.page_size
    tile = math.lcm(page, CUDA_TILE if cuda else RING_TILE)
    empty = []
    for kind in manifest.cache_kinds:
        slots = max(context, manifest.sink + 1)
        if kind.window > 0:
            slots = min(manifest.sink + kind.window + chunk, max(context, manifest.sink + kind.window))
        empty.append(
            KindPlan(
                name=kind.name,
                window=kind.window,
                page_size=page,
                table_pages=-(-slots // tile) * tile // page,
                num_pages=0,
                page_bytes=sum(_slot_bytes(manifest, layer) for layer in kind.layers) * page,
            )
        )
    kinds = _divide(empty, max_sequences, context, max_cache_bytes)
    return EnginePlan(
        max_sequences=max_sequences,
        max_context=context,
        chunk_tokens=chunk,
        page_size=page,
        kinds=tuple(kinds),
        rope_limits=manifest.rope_limits,
    )


def _checked_context(manifest: Manifest, given: int) -> int:
    context = whole_number("max_context", given)
    if context > manifest.max_context:
        raise ConfigError(
            f"max_context {context} is more than the {manifest.max_context} that the model was exported for; "
            "export it again with a larger max_context"
        )
    return context


def _divide(kinds: list[KindPlan], sequences: int, context: int, max_bytes: int | None) -> list[KindPlan]:
    """Give each pool its number of pages."""
    rings = sum(kind.pages_for(context) * kind.page_bytes for kind in kinds if kind.is_ring)  # of one sequence
    full = sum(kind.pages_for(context) * kind.page_bytes for kind in kinds if not kind.is_ring)
    budget = sequences * (rings + full) if max_bytes is None else max_bytes
    ringed = _ringed_sequences(sequences, rings, full, budget) if rings else sequences
    left = budget - ringed * rings
    divided = []
    for kind in kinds:
        wanted = ringed * kind.pages_for(context)
        if not kind.is_ring:
            wanted = min(sequences * kind.pages_for(context), left // kind.page_bytes)
        if wanted < 1 or left < 0:
            raise CapacityError(
                f"max_cache_bytes {budget} is too few: a page of {kind.name!r} takes {kind.page_bytes} bytes, and the "
                f"rings of one sequence {rings}; a sequence of {context} tokens takes {rings + full}"
            )
        divided.append(dataclasses.replace(kind, num_pages=wanted))
    return divided


def _ringed_sequences(sequences: int, rings: int, full: int, budget: int) -> int:
    """Return how many sequences get rings; `rings` and `full` are the bytes of one sequence of the longest."""
    fitting = (n for n in range(sequences, 1, -1) if n * rings + max(n * full // 4, full) <= budget)
    return next(fitting, 1)


def _slot_bytes(manifest: Manifest, layer: int) -> int:
    info = manifest.layers[layer]
    return 2 * info.num_kv_heads * info.head_size * ELEMENT_BYTES[manifest.dtype]
