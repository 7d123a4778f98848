"""Plans caches and chunks: slots and bytes of each layer, pages of each pool, and tokens of a step."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ortolan.errors import CapacityError, ConfigError, whole_number
from ortolan.manifest import CacheKind, LayerInfo, Manifest
from ortolan.runtime.caches.attention import RING_TILE
from ortolan.runtime.caches.layer_state import SLOTS, Sizes, kind_of
from ortolan.runtime.steps.cuts import ANYWHERE, Cuts

REMAKE = "make its folder again with a larger max_context (--max-context of `ortolan export` or `convert`)"
CUDA_TILE = 128  # slots; every cache on CUDA is a multiple of it, so that no tile straddles a ring's wrap
STEPS_AHEAD = 2  # decode steps on CUDA that may be under way when another is run; rings hold room for all of them
CUDA_CHUNK = 16_384  # tokens of a prefill step; larger steps spare kernels' beginnings and ends, and take more memory
SNAPSHOT_SHARE = 8  # of the bytes for full attention, one part is for snapshots of rings and states
CUDA_GROWTH_ROOM = 1024  # slots; each growth captures the decode graph anew


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """The state of one layer, of one sequence.

    Attributes:
        kind: "ring" for sliding-window layers, "full" for other attention; "shared" for a layer that reads another's.
        window: keys a query sees; -1 for all.
        capacity: slots.
        slot_bytes: bytes of one position's keys and values; of a state without positions, all of its bytes.
        full_length_bytes: what a cache of the whole context would take.
        cache_of: the layer whose cache a shared one reads; None where it has its own.
    """

    kind: str
    window: int
    capacity: int
    slot_bytes: int
    full_length_bytes: int
    cache_of: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the planned cache."""
        return self.capacity * self.slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPlan:
    """The pool of one cache kind.

    Attributes:
        name: of the kind, as in the manifest.
        window: keys a query sees; -1 for full attention.
        page_size: P, slots of a page.
        table_pages: M, the most pages of one sequence; a ring wraps after that many.
        num_pages: N, pages of the pool.
        page_bytes: of one page, in all layers of the kind.
        grows: whether a sequence takes more pages as it gets longer; others keep what they have.
        snapshot_pages: of `num_pages`, those planned for snapshots beside what running sequences need.
    """

    name: str
    window: int
    page_size: int
    table_pages: int
    num_pages: int
    page_bytes: int
    grows: bool = True
    snapshot_pages: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_pages * self.page_bytes

    def pages_for(self, slots: int) -> int:
        """Return the pages that hold `slots` appended tokens."""
        return min(-(-slots // self.page_size), self.table_pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """The caches of one sequence, or the pools of many.

    Attributes:
        max_sequences: most sequences that run at once.
        max_context: longest sequence, tokens.
        chunk_size: most tokens of one prefill step; of many sequences together, or `max_sequences` where that is more.
        layers: the state of each layer, of one sequence.
        kinds: the pool of each cache kind; empty where caches are contiguous.
        rope_limits: the longest sequence of each RoPE variant, ascending.
        slot_tile: capacities of full-attention caches that shrink and grow are multiples of it.
        growth_room: slots beyond what is needed now that such a cache gets.
        page_size: slots of a page; 0 where caches are contiguous. Every capacity is a multiple of it.
        bound: most tokens that a full-attention cache ever holds, as evictions make room for every chunk, in caches
            that keep their planned size; None: they hold what was read, and are resized.
        spare: tokens past `max_context` that caches have room for: an eviction reads them, and forgets them again.
        cuts: where sequences may be cut into steps.
    """

    max_context: int
    chunk_size: int
    layers: tuple[LayerPlan, ...]
    kinds: tuple[KindPlan, ...] = ()
    rope_limits: tuple[int, ...] = ()
    max_sequences: int = 1
    slot_tile: int = RING_TILE
    growth_room: int = 256
    page_size: int = 0
    bound: int | None = None
    spare: int = 0
    cuts: Cuts = ANYWHERE

    @property
    def bytes(self) -> int:
        """Bytes of all caches."""
        return sum(part.bytes for part in self.kinds or self.layers)

    @property
    def full_length_bytes(self) -> int:
        """Bytes that one sequence's caches of the whole context would take."""
        return sum(layer.full_length_bytes for layer in self.layers)

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts can begin with what others have read: pages are shared, what is written over is copied."""
        return any(kind.grows for kind in self.kinds)

    @property
    def has_states(self) -> bool:
        """Whether layers keep a recurrent state, which a chunk of more than RECENT_TOKENS tokens moves for good."""
        return any(layer.kind == "gated_delta" for layer in self.layers)

    @property
    def snapshot_spacing(self) -> int:
        """Tokens whose keys and values take as many bytes as a snapshot of what is written over; 0: nothing is."""
        grown = sum(kind.page_bytes for kind in self.kinds if kind.grows)
        copied = sum(kind.table_pages * kind.page_bytes for kind in self.kinds if not kind.grows)
        return -(-copied // grown) * self.page_size if grown else 0

    def sequence_bytes(self, length: int) -> int:
        """Return the bytes of the pages that hold a sequence of `length` tokens, without an eviction."""
        return sum(kind.pages_for(length) * kind.page_bytes for kind in self.kinds)

    def with_capacities(self, capacities: Sequence[int]) -> CachePlan:
        """Return the plan with other slots for each layer of a contiguous sequence."""
        pairs = zip(self.layers, capacities, strict=True)
        return replace(self, layers=tuple(replace(layer, capacity=capacity) for layer, capacity in pairs))

    def grown_capacity(self, index: int, needed: int) -> int:
        """Return the slots of a full-attention cache that must hold `needed` tokens and will go on growing."""
        planned = self.layers[index].capacity
        if self.bound and not self.page_size:
            return planned
        return min(_round_up(needed + self.growth_room, self.slot_tile), planned)

    def evicted_capacity(self, capacity: int, held: int, *, is_first: bool) -> int:
        """Return the slots of a full-attention cache of `capacity` slots once an eviction has left `held` tokens.

        A sequence's first eviction gives back all memory that it can. Later ones let a cache be that an answer and
        a question no longer than `growth_room` have grown, and with it the steps that were captured over it.
        """
        if self.page_size:  # pages come and go without a change of buffers
            return min(_round_up(held, self.page_size), capacity)
        largest = _round_up(held + 2 * self.growth_room, self.slot_tile)
        if self.bound is not None or (not is_first and capacity <= largest):
            return capacity
        return min(_round_up(held, self.slot_tile), capacity)


def plan_caches(
    manifest: Manifest,
    max_context: int | None = None,
    chunk_size: int | None = None,
    *,
    cuda: bool = False,
    budget: int | None = None,
    reread_tokens: int = 0,
) -> CachePlan:
    """Plan the caches of one sequence.

    Args:
        manifest: of the model.
        max_context: longest sequence, tokens; None takes the manifest's.
        chunk_size: most tokens of one prefill step; None takes the manifest's, or on CUDA `CUDA_CHUNK` where nobody
            chose that one and no cache grows with it.
        cuda: round capacities up to whole tiles of the CUDA kernels. Those of a paged model are whole pages.
        budget: tokens that evictions during prefill leave in each full-attention cache, which then has room for
            these and a chunk; None has room for the whole context.
        reread_tokens: of a step in which an eviction reads tokens of the sequence again, behind its end.

    Raises:
        ConfigError: a number is below 1, or the context is longer than the export's.
    """
    context = _checked_context(manifest, max_context)
    if chunk_size is None:
        chunk_size = _default_chunk(manifest, context, may_widen=cuda and budget is None and not manifest.chunk_chosen)
    chunk = whole_number("chunk_size", chunk_size)
    plan = CachePlan(
        max_context=context,
        chunk_size=chunk,
        layers=(),
        rope_limits=manifest.rope_limits,
        slot_tile=manifest.page_size or (CUDA_TILE if cuda else RING_TILE),
        growth_room=_growth_room(chunk, cuda=cuda, paged=manifest.paged),
        page_size=manifest.page_size,
        bound=None if budget is None else min(context, budget + chunk),
        spare=min(reread_tokens, chunk, context),
    )
    plan = replace(plan, layers=_plan_layers(manifest, plan, cuda=cuda))
    kinds = [_pool(manifest, kind, plan) for kind in manifest.cache_kinds]
    return replace(plan, kinds=tuple(replace(kind, num_pages=kind.table_pages) for kind in kinds))


def plan_pools(
    manifest: Manifest,
    max_sequences: int,
    max_cache_bytes: int | None = None,
    chunk_tokens: int | None = None,
    max_context: int | None = None,
    *,
    cuda: bool = False,
) -> CachePlan:
    """Divide a number of bytes among the page pools of many sequences.

    Rings take what `max_sequences` sequences need, or fewer: as many as leave the full-attention pool a quarter
    of `max_context` for each, and room for one sequence of that length. The same goes for recurrent states. Snapshots
    of both get up to an eighth of what is left, at most one for each sequence. The full-attention pool gets the rest,
    at most what all sequences can use.

    Args:
        manifest: of a paged model.
        max_sequences: most sequences that run at once.
        max_cache_bytes: of all pools together; None takes what `max_sequences` of the longest sequences need, and
            their snapshots.
        chunk_tokens: most tokens of a step; None takes the manifest's chunk size.
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
    if max_cache_bytes is not None:
        max_cache_bytes = whole_number("max_cache_bytes", max_cache_bytes)
    plan = plan_caches(manifest, max_context, chunk, cuda=cuda)
    kinds = _divide(plan, max_sequences, max_cache_bytes)
    return replace(plan, max_sequences=max_sequences, kinds=tuple(kinds))


def _checked_context(manifest: Manifest, given: int | None) -> int:
    context = whole_number("max_context", manifest.max_context if given is None else given)
    if context > manifest.max_context:
        raise ConfigError(
            f"max_context {context} is more than the {manifest.max_context} that the model was made for; give at most "
            f"that, or {REMAKE}"
        )
    return context


def context_advice(planned: int, manifest: Manifest, what: str = "session") -> str:
    """Say what to change for longer sequences than `planned` tokens: the session or engine, or the model folder."""
    if planned < manifest.max_context:
        return f"make the {what} with a larger max_context, at most the model's {manifest.max_context} (--max-context)"
    return f"the model was made for no more: {REMAKE}"


def _default_chunk(manifest: Manifest, context: int, *, may_widen: bool) -> int:
    """Return the tokens of a prefill step where a session names none; rings would grow with it."""
    if not may_widen or any(layer.window > 0 for layer in manifest.layers):
        return manifest.chunk_size
    return max(manifest.chunk_size, min(CUDA_CHUNK, context))


def _growth_room(chunk: int, *, cuda: bool, paged: bool) -> int:
    """Return the slots that a cache gets in advance; on CUDA a chain of steps ends where it must grow."""
    if paged:
        return 0
    return CUDA_GROWTH_ROOM if cuda else min(chunk, 256)


def _plan_layers(manifest: Manifest, plan: CachePlan, *, cuda: bool) -> tuple[LayerPlan, ...]:
    sizes = Sizes(
        max_context=plan.max_context,
        step_tokens=max(min(plan.chunk_size, plan.max_context), STEPS_AHEAD + 1 if cuda else 1),
        sink=manifest.sink,
        bound=plan.bound,
        spare=plan.spare,
    )
    multiple = max(manifest.page_size, CUDA_TILE if cuda else 1)  # both are powers of two
    return tuple(_plan_layer(manifest, index, layer, sizes, multiple) for index, layer in enumerate(manifest.layers))


def _plan_layer(manifest: Manifest, index: int, layer: LayerInfo, sizes: Sizes, multiple: int) -> LayerPlan:
    if layer.cache_of is not None:
        return LayerPlan(
            kind="shared",
            window=layer.window,
            capacity=0,
            slot_bytes=0,
            full_length_bytes=0,
            cache_of=layer.cache_of,
        )
    kind = kind_of(layer)
    specs = kind.tensors(index, layer, manifest)
    has_slots = any(SLOTS in spec.page_shape for spec in specs)
    slot_bytes = sum(spec.page_bytes(1) for spec in specs)
    return LayerPlan(
        kind=kind.name,
        window=layer.window,
        capacity=_round_up(kind.slots(layer, sizes), multiple) if has_slots else 1,
        slot_bytes=slot_bytes,
        full_length_bytes=slot_bytes * (sizes.max_context if has_slots else 1),
    )


def _pool(manifest: Manifest, kind: CacheKind, plan: CachePlan) -> KindPlan:
    """Plan the pool of a kind without pages yet."""
    first, state = plan.layers[kind.layers[0]], kind_of(manifest.layers[kind.layers[0]])
    per_page = sum(plan.layers[index].slot_bytes for index in kind.layers)
    return KindPlan(
        name=kind.name,
        window=kind.window,
        page_size=manifest.page_size,
        table_pages=max(1, first.capacity // manifest.page_size),
        num_pages=0,
        page_bytes=per_page * min(manifest.page_size, first.capacity),
        grows=state.grows,
    )


def _divide(plan: CachePlan, sequences: int, max_bytes: int | None) -> list[KindPlan]:
    """Give each pool its number of pages."""
    context, kinds = plan.max_context, plan.kinds
    fixed = sum(kind.pages_for(context) * kind.page_bytes for kind in kinds if not kind.grows)  # of one sequence
    full = sum(kind.pages_for(context) * kind.page_bytes for kind in kinds if kind.grows)
    if max_bytes is None:
        ringed, snapshots = sequences, _snapshots(sequences, fixed, sequences * full)
        budget = sequences * (fixed + full) + snapshots * fixed
    else:
        budget = max_bytes
        ringed = _ringed_sequences(sequences, fixed, full, budget) if fixed else sequences
        left = budget - ringed * fixed
        snapshots = min(_snapshots(sequences, fixed, left if full else 0), max(0, left - full) // max(fixed, 1))
    left = budget - (ringed + snapshots) * fixed
    divided = []
    for kind in kinds:
        per_sequence = kind.pages_for(context)
        wanted = (ringed + snapshots) * per_sequence
        if kind.grows:
            wanted = min(sequences * per_sequence, left // kind.page_bytes)
        if wanted < 1 or left < 0:
            raise CapacityError(
                f"max_cache_bytes {budget} is too few: a page of {kind.name!r} takes {kind.page_bytes} bytes, and the "
                f"rings and states of one sequence {fixed}; a sequence of {context} tokens takes {fixed + full}"
            )
        spare = 0 if kind.grows else snapshots * per_sequence
        divided.append(dataclasses.replace(kind, num_pages=wanted, snapshot_pages=spare))
    return divided


def _snapshots(sequences: int, fixed: int, left: int) -> int:
    """Return how many snapshots of `fixed` bytes get room in the bytes that are left for full attention."""
    return min(sequences, left // SNAPSHOT_SHARE // fixed) if fixed and left > 0 else 0


def _ringed_sequences(sequences: int, fixed: int, full: int, budget: int) -> int:
    """Return how many sequences get rings; `fixed` and `full` are the bytes of one sequence of the longest."""
    fitting = (
        n for n in range(min(sequences, budget // fixed), 1, -1) if n * fixed + max(n * full // 4, full) <= budget
    )
    return next(fitting, 1)


def rope_variant(limits: Sequence[int], length: int) -> int:
    """Return which variant of RoPE serves a sequence of `length` tokens: the first whose limit allows them.

    Args:
        limits: the longest sequence of each variant, ascending.
        length: at most the last limit.
    """
    return bisect_left(limits, length)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
