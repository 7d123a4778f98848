"""One sequence: prefill in chunks, decode, evict, rewind, generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import CapacityError, ConfigError, NumericError, OrtolanError
from ortolan.manifest import Manifest
from ortolan.runtime.buffers import Array, Buffers, HostBuffers
from ortolan.runtime.evictor import evict
from ortolan.runtime.lengths import Lengths
from ortolan.runtime.memory import MemoryReport
from ortolan.runtime.options import Sampling, SnapKv
from ortolan.runtime.paged_caches import make_caches
from ortolan.runtime.plan import CachePlan, ring_keeps, split_chunks
from ortolan.runtime.sampler import Sampler
from ortolan.runtime.stats import Stats
from ortolan.runtime.stepper import Logits, Stepper


class Session:
    """Reads and continues one sequence. Made by `Model.session`; not thread-safe.

    Tokens that `generate` yields belong to the sequence: the last one is fed together with whatever comes
    next, also where the caller stopped early.
    """

    def __init__(
        self,
        manifest: Manifest,
        ort_session: Any,
        plan: CachePlan,
        snapkv: SnapKv | None,
        evict_session: Any,
        buffers: Buffers | None = None,
        weights_bytes: int = 0,
    ) -> None:
        self.plan = plan
        self.stats = Stats()
        self.finish_reason: str | None = None
        self._manifest = manifest
        self._snapkv = snapkv
        self._evict_session = evict_session
        self._weights_bytes = weights_bytes
        self._capture_rows = snapkv.window if snapkv else 0
        self._caches = make_caches(manifest, plan, self._capture_rows, buffers or HostBuffers())
        self._stepper = self._make_stepper(ort_session)
        self._lengths = Lengths(manifest)
        self._history: list[int] = []  # every token fed so far
        self._pending: list[int] = []  # yielded by generate, not fed yet
        self._variant = 0
        self._captured_at_eviction: dict[int, Array] = {}

    @property
    def logical_length(self) -> int:
        """Tokens read so far."""
        return self._lengths.logical

    @property
    def cache_bytes(self) -> int:
        """Bytes that the key and value caches take now; of paged ones, their pages."""
        return self._caches.bytes

    def physical_length(self, layer: int) -> int:
        """Return the tokens that one layer's cache holds: after an eviction, fewer than were read."""
        self._check_layer(layer)
        if layer in self._lengths.physical:
            return int(self._lengths.physical[layer].max())
        return min(self._lengths.logical, self.cache_capacity(layer))

    def cache_capacity(self, layer: int) -> int:
        """Return the slots of one layer's cache now."""
        self._check_layer(layer)
        return self._caches.capacity(layer)

    def kept_positions(self, layer: int) -> npt.NDArray[np.int32] | None:
        """Return the positions that the last eviction kept, [Hkv, K] ascending; None before one.

        Where kv heads keep different numbers, -1 follows those of a head with fewer.
        """
        self._check_layer(layer)
        kept = self._lengths.kept.get(layer)
        return None if kept is None else kept.copy()

    def prefill(
        self, token_ids: Sequence[int] | npt.NDArray[Any], progress: Callable[[int], object] | None = None
    ) -> Logits:
        """Read a prompt, or the next turn, in chunks; evict afterwards where SnapKV asks for it.

        Args:
            token_ids: [T], at least one.
            progress: called with the number of tokens of each chunk that was read.

        Returns:
            Logits [V] float32 of the last token, those before any eviction.

        Raises:
            ConfigError: no tokens, or ids outside the vocabulary; nothing was read.
            CapacityError: the sequence would pass `max_context`, or ring history is gone; nothing was read.
            NumericError: the model produced NaN or infinity. As after any failed step, the session then ends
                before the chunk that failed; `logical_length` says where.
        """
        return self._fetch(self._read_prompt(token_ids, progress))

    def step(self, token_id: int) -> Logits:
        """Feed one token; returns logits [V] float32. Raises as `prefill` does."""
        tokens = self._checked([token_id])
        self._settle()
        return self._decode(tokens)

    def generate(
        self,
        token_ids: Sequence[int] | npt.NDArray[Any],
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Iterator[int]:
        """Read a prompt and yield the tokens that follow it, without the end-of-sequence token.

        The prompt is read by this call, not by the first `next`. When the iterator ends, `finish_reason` is
        "eos", "length" (max_new_tokens) or "context" (max_context); until then, and where it is left early,
        it is None.

        Raises:
            ConfigError: max_new_tokens is below 1, or the session was used otherwise before the iterator
                ended; besides, as `prefill`.
        """
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        self.finish_reason = None
        logits = self._read_prompt(token_ids, progress)
        return self._continue(logits, max_new_tokens, sampling or Sampling())

    def rewind(self, length: int) -> None:
        """Forget all tokens from logical position `length` on; 0 starts anew.

        A token that `generate` yielded last, and that is not fed yet, is forgotten too.

        Raises:
            ConfigError: the length is negative, or more than was read.
            CapacityError: the history before it is gone: evicted, or overwritten in a ring.
        """
        if not 0 <= length <= self.logical_length:
            raise ConfigError(f"rewind({length}) must lie in 0 .. logical_length = {self.logical_length}")
        self._settle()
        if length == 0:
            self._lengths.clear()
            self._variant = 0
        elif length < self.logical_length:
            self._check_rewind(length)
            self._lengths.rewind(length, self._capture_rows)
        del self._history[length:]
        self._pending.clear()
        held = self._held()
        self._caches.release({i: self._grown(i, length) if length else 0 for i, length in held.items()}, held)

    def memory_report(self) -> MemoryReport:
        """Say what holds how many bytes now: weights, caches, captured queries, buffers of steps, and the rest."""
        return MemoryReport(
            device="cpu",
            weights_bytes=self._weights_bytes,
            cache_bytes=self.cache_bytes,
            planned_cache_bytes=self.plan.bytes,
            free_page_bytes=self._caches.free_bytes,
            capture_bytes=self._caches.capture_bytes,
            step_bytes=self._stepper.bytes,
        )

    def _make_stepper(self, ort_session: Any) -> Any:
        return Stepper(ort_session, self._manifest, self._caches)

    def _settle(self) -> None:
        """Take note that the session is used otherwise than by the generation under way, if there is one."""

    def _fetch(self, logits: Any) -> Logits:
        """Return logits [V] of a read on the host."""
        result: Logits = logits
        return result

    def _read_prompt(
        self, token_ids: Sequence[int] | npt.NDArray[Any], progress: Callable[[int], object] | None
    ) -> Any:
        """Do what `prefill` says; the logits stay where the steps left them."""
        tokens = self._checked(token_ids)
        self._settle()
        self._prepare_capture(len(tokens))
        start = time.perf_counter()
        logits = self._feed(tokens, progress)
        self.stats.prefill_seconds += time.perf_counter() - start
        self.stats.prefill_tokens += len(tokens)
        self._evict_if_due()
        return logits

    def _continue(self, logits: Any, max_new_tokens: int, sampling: Sampling) -> Iterator[int]:
        sampler = Sampler(sampling)
        for count in range(1, max_new_tokens + 1):
            token = sampler.choose(logits, self._history)
            if token in self._manifest.eos_token_ids:
                self.finish_reason = "eos"
                return
            pending = self._pending = [token]
            yield token
            if self._pending is not pending or not pending:
                raise ConfigError("the session was used otherwise since the last token; start a new generate")
            if count == max_new_tokens:
                self.finish_reason = "length"
                return
            if self.logical_length + 1 > self.plan.max_context:
                self.finish_reason = "context"
                return
            logits = self._decode(self._with_pending(np.empty(0, np.int64)))

    def _decode(self, tokens: npt.NDArray[np.int64]) -> Logits:
        start, captured = time.perf_counter(), self.stats.graph_capture_seconds
        logits = self._fetch(self._feed(tokens, None))
        self.stats.decode_seconds += time.perf_counter() - start - (self.stats.graph_capture_seconds - captured)
        self.stats.decode_tokens += len(tokens)
        return logits

    def _checked(self, token_ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Check ids, and return those to feed."""
        try:
            given = np.asarray(token_ids)
        except ValueError as error:
            raise ConfigError(f"token_ids are no list of integers: {error}") from error
        if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
            raise ConfigError(
                f"token_ids has shape {list(given.shape)} and type {given.dtype}; "
                "expected at least one integer in one dimension"
            )
        vocabulary = self._manifest.vocab_size
        if given.min() < 0 or given.max() >= vocabulary:
            raise ConfigError(f"token ids {int(given.min())} .. {int(given.max())} must lie in 0 .. {vocabulary - 1}")
        return self._with_pending(given.astype(np.int64))

    def _with_pending(self, given: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Put the token that `generate` left before the given ones, and check that there is room."""
        tokens = np.concatenate([np.array(self._pending, np.int64), given])
        after = self.logical_length + len(tokens)
        if after > self.plan.max_context:
            raise CapacityError(
                f"{len(tokens)} more tokens make {after}, past max_context = {self.plan.max_context} "
                f"({self.logical_length} are read); make the session with a larger max_context"
            )
        if self._missing_ring(self.logical_length) is not None:
            raise CapacityError("a failed step overwrote ring history; call rewind(0) and read the sequence again")
        return tokens

    def _feed(self, tokens: npt.NDArray[np.int64], progress: Callable[[int], object] | None) -> Any:
        after = self.logical_length + len(tokens)
        variant = next(i for i, limit in enumerate(self._manifest.rope_limits) if limit >= after)
        if variant != self._variant:
            tokens = self._restart(tokens, variant)
        self._make_room(len(tokens))

        def note(count: int) -> None:
            self._pending.clear()
            if progress:
                progress(count)

        return self._read(tokens, note)

    def _read(self, tokens: npt.NDArray[np.int64], note: Callable[[int], object]) -> Any:
        """Run the decoder over tokens in chunks; `note` is called with the size of each that is read."""
        for begin, end in split_chunks(len(tokens), self.plan.chunk_size):
            logits = self._run(tokens[begin:end])
            note(end - begin)
        return logits

    def _run(self, chunk: npt.NDArray[np.int64]) -> Logits:
        lengths = self._lengths
        lengths.discard(len(chunk), self._capture_rows)  # written even where the run fails
        logits: Logits = self._stepper.run(chunk, lengths.logical, lengths.physical, self._variant).copy()
        if not np.isfinite(logits.sum(dtype=np.float64)):
            raise self._numeric_error(len(chunk))
        lengths.advance(len(chunk))
        self._history.extend(chunk.tolist())
        return logits

    def _numeric_error(self, count: int) -> NumericError:
        return NumericError(
            f"the logits after position {self._lengths.logical + count - 1} hold NaN or infinity; "
            "rewind, or export with a wider dtype"
        )

    def _restart(self, tokens: npt.NDArray[np.int64], variant: int) -> npt.NDArray[np.int64]:
        """Read the whole sequence again with the frequencies of its new length, as transformers does."""
        if self._lengths.evicted_at:
            raise CapacityError(
                f"past {self._manifest.rope_limits[self._variant]} tokens this model rotates all keys anew, "
                "but some were evicted; start a session whose first prompt is that long"
            )
        everything = np.concatenate([np.array(self._history, np.int64), tokens])
        self._lengths.clear()
        self._history.clear()
        self._variant = variant
        return everything

    def _held(self) -> dict[int, int]:
        """Return how many tokens each full-attention cache holds, by layer; where kv heads differ, the most."""
        physical, logical = self._lengths.physical, self.logical_length
        return {
            index: int(physical[index].max()) if index in physical else logical
            for index, layer in enumerate(self.plan.layers)
            if layer.kind == "full"
        }

    def _make_room(self, count: int) -> None:
        """Grow full-attention caches: those that an eviction had shrunk, and paged ones."""
        held = self._held()
        slots = {i: self.cache_capacity(i) for i in held}
        grown = {i: self._grown(i, held[i] + count) for i in held if held[i] + count > slots[i]}
        if grown:
            self._caches.fit(slots | grown, held)

    def _grown(self, index: int, needed: int) -> int:
        """Return the slots that a full-attention cache of `needed` tokens gets."""
        return max(self.plan.grown_capacity(index, needed), self._manifest.sink + 1)

    def _is_due(self, count: int) -> bool:
        """Say whether `count` more tokens make a full-attention cache pass the budget."""
        held = max((int(lengths.max()) for lengths in self._lengths.physical.values()), default=0)
        return self._snapkv is not None and held + count > self._snapkv.budget

    def _evict_if_due(self) -> None:
        if self._snapkv is None or not self._is_due(0):
            return
        start = time.perf_counter()
        physical, caches = self._lengths.physical, self._caches
        try:
            keep = evict(self._evict_session, caches, self._snapkv, physical, self.logical_length)
        except OrtolanError as error:
            self.rewind(0)
            raise OrtolanError(f"{error}; the caches are lost, so the session is empty again") from error
        self._lengths.record_eviction(keep)
        self._captured_at_eviction = caches.copy_captures()
        held = self._held()
        caches.fit({i: self._grown(i, length) for i, length in held.items()}, held)
        caches.buffers.trim()
        self.stats.evictions += 1
        self.stats.eviction_seconds += time.perf_counter() - start

    def _prepare_capture(self, count: int) -> None:
        """Restore captured queries that a rewind left stale, if the next `count` tokens bring an eviction.

        Queries before the last eviction come from a copy made then: their keys are gone. Later ones are
        captured by feeding their tokens again.

        Raises:
            CapacityError: a ring no longer holds what these tokens look back on; nothing was read.
        """
        lengths = self._lengths
        begin = max(0, lengths.logical + count - self._capture_rows)  # the oldest query needed
        if not self._is_due(count) or begin >= lengths.captured_from:
            return
        first = max(begin, lengths.evicted_at)
        tail = np.array(self._history[first:], np.int64)
        self._check_rewind(first)
        if begin < lengths.evicted_at:
            self._caches.restore_captures(self._captured_at_eviction)
        lengths.rewind(first, self._capture_rows)
        lengths.captured_from = begin
        del self._history[first:]
        if len(tail):
            self._read(tail, lambda _: None)

    def _check_rewind(self, length: int) -> None:
        if length < self._lengths.evicted_at:
            raise CapacityError(
                f"rewind({length}): tokens before {self._lengths.evicted_at} were evicted from the "
                f"full-attention caches; rewind to {self._lengths.evicted_at} or later, or to 0"
            )
        layer = self._missing_ring(length)
        if layer is not None:
            raise CapacityError(
                f"rewind({length}): the ring of layer {layer}, of {self.cache_capacity(layer)} slots, has "
                f"overwritten what position {length} looks back on; rewind to 0 and read the sequence again"
            )

    def _missing_ring(self, length: int) -> int | None:
        """Return a ring layer that no longer holds the window before `length`."""
        for index, layer in enumerate(self.plan.layers):
            if layer.kind == "ring" and not ring_keeps(length, self._lengths.highest, layer, self._manifest.sink):
                return index
        return None

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < len(self.plan.layers):
            raise ConfigError(f"layer {layer} must lie in 0 .. {len(self.plan.layers) - 1}")
