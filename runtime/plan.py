"""Plans caches and chunks: how many slots and bytes each layer takes, and how a prompt is cut."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ortolan.errors import ConfigError, whole_number
from ortolan.manifest import Manifest

RING_TILE = 64  # slots; rings are a multiple of it, so that tiles of kernels divide them
CUDA_TILE = 128  # slots; every cache on CUDA is a multiple of it, so that no tile straddles a ring's wrap
STEPS_AHEAD = 2  # decode steps on CUDA that may be under way past the last token read; rings hold room for them
CUDA_CHUNK = 16_384  # tokens of a prefill step; larger steps spare kernels' beginnings and ends, and take more memory
CUDA_GROWTH_ROOM = 1024  # slots; each growth captures the decode graph anew
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """The cache of one layer.

    Attributes:
        kind: "ring" for sliding-window layers, "full" for the others.
        window: keys a query sees; -1 for all.
        capacity: slots.
        slot_bytes: bytes of one position's keys and values.
        full_length_bytes: what a cache of the whole context would take.
    """

    kind: str
    window: int
    capacity: int
    slot_bytes: int
    full_length_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of the planned cache."""
        return self.capacity * self.slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """The caches of one sequence.

    Attributes:
        max_context: longest sequence, tokens.
        chunk_size: most tokens of one prefill step.
        layers: the cache of each layer.
        slot_tile: capacities of full-attention caches that shrink and grow are multiples of it.
        growth_room: slots beyond what is needed now that such a cache gets.
        page_size: slots of a page; 0 where caches are contiguous. Every capacity is a multiple of it.
        bound: most tokens that a full-attention cache ever holds, as evictions make room for every chunk, in caches
            that keep their planned size; None: they hold what was read, and are resized.
    """

    max_context: int
    chunk_size: int
    layers: tuple[LayerPlan, ...]
    slot_tile: int = RING_TILE
    growth_room: int = 256
    page_size: int = 0
    bound: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all caches."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def full_length_bytes(self) -> int:
        """Bytes that caches of the whole context would take."""
        return sum(layer.full_length_bytes for layer in self.layers)

    def with_capacities(self, capacities: Sequence[int]) -> CachePlan:
        """Return the plan with other slots for each layer."""
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


def ring_capacity(sink: int, window: int, chunk_size: int) -> int:
    """Return the slots of a ring: every chunk is appended before its queries attend."""
    return _round_up(sink + window + chunk_size, RING_TILE)


def plan_caches(
    manifest: Manifest,
    max_context: int | None = None,
    chunk_size: int | None = None,
    *,
    cuda: bool = False,
    budget: int | None = None,
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

    Raises:
        ConfigError: a number is below 1, or the context is longer than the export's.
    """
    context = whole_number("max_context", manifest.max_context if max_context is None else max_context)
    may_widen = cuda and budget is None and not manifest.chunk_chosen
    chunk = _default_chunk(manifest, context, may_widen=may_widen) if chunk_size is None else chunk_size
    chunk = whole_number("chunk_size", chunk)
    if context > manifest.max_context:
        raise ConfigError(
            f"max_context {context} is more than the {manifest.max_context} that the model was exported for; "
            "export it again with a larger max_context"
        )
    bound = None if budget is None else min(context, budget + chunk)
    layers = []
    multiple = max(manifest.page_size, CUDA_TILE if cuda else 1)  # both are powers of two
    for layer in manifest.layers:
        slot_bytes = 2 * layer.num_kv_heads * layer.head_size * ELEMENT_BYTES[manifest.dtype]
        layers.append(
            LayerPlan(
                kind="ring" if layer.window > 0 else "full",
                window=layer.window,
                capacity=_round_up(
                    _ring_slots(manifest.sink, layer.window, context, chunk, cuda)
                    if layer.window > 0
                    else max(bound or context, manifest.sink + 1),
                    multiple,
                ),
                slot_bytes=slot_bytes,
                full_length_bytes=context * slot_bytes,
            )
        )
    return CachePlan(
        max_context=context,
        chunk_size=chunk,
        layers=tuple(layers),
        slot_tile=manifest.page_size or (CUDA_TILE if cuda else RING_TILE),
        growth_room=_growth_room(chunk, cuda=cuda, paged=manifest.paged),
        page_size=manifest.page_size,
        bound=bound,
    )


def _default_chunk(manifest: Manifest, context: int, *, may_widen: bool) -> int:
    """Return the tokens of a prefill step where a session names none; rings would grow with it."""
    if not may_widen or any(layer.window > 0 for layer in manifest.layers):
        return manifest.chunk_size
    return max(manifest.chunk_size, min(CUDA_CHUNK, context))


def _growth_room(chunk: int, *, cuda: bool, paged: bool) -> int:
    """Return the slots that a cache gets in advance; on CUDA a chain of steps ends where it must grow."""
    if cuda:
        return CUDA_GROWTH_ROOM
    return 0 if paged else min(chunk, 256)


def _ring_slots(sink: int, window: int, context: int, chunk: int, cuda: bool) -> int:
    """Return the slots that a ring needs: at most the context's."""
    largest_step = max(min(chunk, context), STEPS_AHEAD + 1 if cuda else 1)
    return max(min(ring_capacity(sink, window, largest_step), context), sink + window)


def split_chunks(count: int, chunk_size: int) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of at most `chunk_size` that cover 0 .. count."""
    for begin in range(0, count, chunk_size):
        yield begin, min(begin + chunk_size, count)


def rope_variant(limits: Sequence[int], length: int) -> int:
    """Return which variant of RoPE serves a sequence of `length` tokens: the first whose limit allows them.

    Args:
        limits: the longest sequence of each variant, ascending.
        length: at most the last limit.
    """
    return bisect_left(limits, length)


def ring_keeps(length: int, highest: int, layer: LayerPlan, sink: int) -> bool:
    """Say whether a ring still holds what the query at position `length` sees before itself.

    Args:
        length: tokens that would be in the sequence.
        highest: the largest length the ring was ever written to.
        layer: the ring.
        sink: S.
    """
    oldest = max(sink, length - layer.window + 1)
    return oldest >= length or oldest + layer.capacity - sink >= highest


def slot_runs(begin: int, end: int, capacity: int, sink: int) -> Iterator[tuple[int, int]]:
    """Yield (first slot, count) of the contiguous slots that hold positions begin .. end, in their order.

    Source: the slot rule of the operators; all positions must be in the cache, so that no slot comes twice.
    """
    while begin < end:
        slot = begin if begin < sink else sink + (begin - sink) % (capacity - sink)
        count = min(end - begin, capacity - slot)
        yield slot, count
        begin += count


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
