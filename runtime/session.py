"""One sequence: prefill in chunks, decode, evict, rewind, generate."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import CapacityError, ConfigError, ContextLengthError, NumericError, check_progress, whole_number
from ortolan.manifest import Manifest
from ortolan.policies import Eviction
from ortolan.runtime.buffers import Array, Buffers, HostBuffers
from ortolan.runtime.evicting import EvictingSession
from ortolan.runtime.fingerprint import Fingerprint
from ortolan.runtime.generating import GeneratingSession
from ortolan.runtime.lengths import Lengths
from ortolan.runtime.memory import MemoryReport
from ortolan.runtime.paged_caches import make_caches
from ortolan.runtime.plan import CachePlan, rope_variant, split_chunks
from ortolan.runtime.restore import SavedSession
from ortolan.runtime.sampler import Generation
from ortolan.runtime.session_state import SessionState, save_state
from ortolan.runtime.stats import Stats
from ortolan.runtime.step_inputs import check_token_ids
from ortolan.runtime.stepper import Logits, Stepper


class Session(EvictingSession, GeneratingSession):
    """Reads and continues one sequence. Made by `Model.session`; not thread-safe.

    Tokens that `generate` yields belong to the sequence: the last one is fed together with whatever comes
    next, also where the caller stopped early.
    """

    def __init__(
        self,
        manifest: Manifest,
        ort_session: Any,
        plan: CachePlan,
        snapkv: Eviction | None,
        evict_session: Any,
        buffers: Buffers | None = None,
        weights_bytes: int = 0,
        identify: Callable[[], Fingerprint] | None = None,
        capacities: Sequence[int] | None = None,
    ) -> None:
        self.plan = plan
        self.stats = Stats()
        self.finish_reason: str | None = None
        self._manifest = manifest
        self._snapkv = snapkv
        self._evict_session = evict_session
        self._weights_bytes = weights_bytes
        self._capture_rows = min(snapkv.captured_queries, plan.max_context) if snapkv else 0
        self._identify = identify
        self._caches = make_caches(manifest, plan, self._capture_rows, buffers or HostBuffers(), capacities)
        self._stepper = self._make_stepper(ort_session)
        self._lengths = Lengths(manifest)
        self._history: list[int] = []  # every token fed so far
        self._pending: list[int] = []  # yielded by generate, not fed yet
        self._variant = 0
        self._captured_at_eviction: dict[int, Array] = {}
        self._generation: Generation | None = None  # the last one, until the session is used otherwise
        self._is_reading = False  # while a prompt's `progress` is called

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
        return self._lengths.held().get(layer, min(self._lengths.logical, self.cache_capacity(layer)))

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

        Reading that ends early, by a failed step, an interrupt or what `progress` raises, leaves the session with the
        first `logical_length` tokens of its sequence and nothing else, fewer than before the call where tokens were
        being read again. Another call reads the rest: all tokens from there on, the one that `generate` yielded last
        included. If no chunk read that one, it no longer waits to be fed.

        Args:
            token_ids: [T], at least one.
            progress: called with the number of tokens of each chunk that was read, the token that `generate` yielded
                last included. What it raises ends the reading after that chunk.

        Returns:
            Logits [V] float32 of the last token, those before any eviction.

        Raises:
            ConfigError: no tokens, ids outside the vocabulary, or no function `progress`; nothing was read.
            CapacityError: ring history is gone, or, as ContextLengthError, `max_context` would be passed; nothing was
                read, and a token that `generate` yielded last still waits to be fed.
            NumericError: the model produced NaN or infinity. As after any failed step, the session then ends
                before the chunk that failed; `logical_length` says where.
        """
        return self._fetch(self._read_prompt(token_ids, progress))

    def step(self, token_id: int) -> Logits:
        """Feed one token; returns logits [V] float32. Raises as `prefill` does."""
        tokens = self._checked([token_id])
        self._settle()
        with self._ending_at_what_was_read():
            return self._decode(tokens)

    def save(self, path: str | Path, rewind_tokens: int = 0) -> None:
        """Write the session to one file, from which `Model.restore` makes it anew; it can be used on.

        May be called between the tokens of `generate`: a restored session then goes on with `resume`.

        Args:
            path: of the file; replaced where it exists, and only by a whole one.
            rewind_tokens: how far the restored session can rewind where the model has sliding windows, if this one
                can; full-attention caches rewind as here. Each costs a slot in every ring.

        Raises:
            ConfigError: no file can have that name or may be made there, or the session is reading a prompt.
            StorageError: the disk is full, or writing failed otherwise; `path` is what it was before.
            ContractMismatchError: the model's files, which tell what model it is, are gone.
        """
        if self._identify is None or self._is_reading:
            raise ConfigError("a session can be saved between calls only, and where Model.session made it")
        save_state(path, self._state(), self._manifest, self._identify(), rewind_tokens)

    def rewind(self, length: int) -> None:
        """Forget all tokens from logical position `length` on; 0 starts anew.

        A token that `generate` yielded last, and that is not fed yet, is forgotten too.

        Raises:
            ConfigError: the length is negative, or more than was read.
            CapacityError: the history before it is gone: evicted, or overwritten in a ring.
        """
        length = whole_number("the length to rewind to", length, 0, self.logical_length)
        self._settle()
        if length == 0:
            self._lengths.clear()
            self._variant = 0
        elif length < self.logical_length:
            self._lengths.check_rewind(length, self.plan)
            self._lengths.rewind(length, self._capture_rows)
        del self._history[length:]
        self._pending.clear()
        held = self._lengths.held()
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

    def fill_from(self, saved: SavedSession) -> None:
        """Take over a saved session's state and caches; for `Model.restore`, which makes the session for it."""
        self._adopt(saved.load(self._state(), self._manifest))

    def _state(self) -> SessionState:
        """Return what there is to save; `_adopt` takes it."""
        return SessionState(
            plan=self.plan,
            snapkv=self._snapkv,
            capture_rows=self._capture_rows,
            caches=self._caches,
            capacities=[self.cache_capacity(index) for index in range(len(self.plan.layers))],
            lengths=copy.deepcopy(self._lengths),
            history=self._history,
            pending=self._pending,
            variant=self._variant,
            generation=self._resumable(),
            finish_reason=self.finish_reason,
            captured_at_eviction=self._captured_at_eviction,
        )

    def _adopt(self, state: SessionState) -> None:
        """Go on from a state whose caches are this session's."""
        self._lengths, self._history, self._pending = state.lengths, state.history, state.pending
        self._variant, self._generation, self.finish_reason = state.variant, state.generation, state.finish_reason
        self._captured_at_eviction = state.captured_at_eviction

    def _fetch(self, logits: Any) -> Logits:
        """Return logits [V] of a read on the host."""
        result: Logits = logits
        return result

    def _read_prompt(
        self, token_ids: Sequence[int] | npt.NDArray[Any], progress: Callable[[int], object] | None
    ) -> Any:
        """Do what `prefill` says; the logits stay where the steps left them."""
        check_progress(progress)
        tokens = self._checked(token_ids)
        self._settle()
        first = len(tokens) if self.plan.bound is None else min(len(tokens), self.plan.chunk_size)
        with self._ending_at_what_was_read():
            self._free_room(first)
            self._prepare_capture(first)
            start, evicting = time.perf_counter(), self.stats.eviction_seconds
            logits = self._feed(tokens, progress)
        self.stats.prefill_seconds += time.perf_counter() - start - (self.stats.eviction_seconds - evicting)
        self.stats.prefill_tokens += len(tokens)
        self._evict_if_due()
        return logits

    def _decode(self, tokens: npt.NDArray[np.int64]) -> Logits:
        start, captured = time.perf_counter(), self.stats.graph_capture_seconds
        logits = self._fetch(self._feed(tokens, None))
        self.stats.decode_seconds += time.perf_counter() - start - (self.stats.graph_capture_seconds - captured)
        self.stats.decode_tokens += len(tokens)
        return logits

    def _checked(self, token_ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Check ids, and return those to feed."""
        return self._with_pending(check_token_ids(token_ids, self._manifest.vocab_size))

    def _with_pending(self, given: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Put the token that `generate` left before the given ones, and check that there is room."""
        tokens = np.concatenate([np.array(self._pending, np.int64), given])
        after = self.logical_length + len(tokens)
        if after > self.plan.max_context:
            raise ContextLengthError(
                f"{len(tokens)} more tokens make {after}, past max_context = {self.plan.max_context} "
                f"({self.logical_length} are read); make the session with a larger max_context"
            )
        if self._lengths.missing_ring(self.logical_length, self.plan) is not None:
            raise CapacityError("a failed step overwrote ring history; call rewind(0) and read the sequence again")
        return tokens

    def _feed(self, tokens: npt.NDArray[np.int64], progress: Callable[[int], object] | None) -> Any:
        variant = rope_variant(self._manifest.rope_limits, self.logical_length + len(tokens))
        if variant != self._variant:
            return self._restart(tokens, variant, progress)
        return self._read_on(tokens, progress)

    def _read_on(self, tokens: npt.NDArray[np.int64], progress: Callable[[int], object] | None) -> Any:
        """Read tokens behind those read so far; caches get room for them."""

        def note(count: int) -> None:
            self._pending.clear()
            if progress:
                self._is_reading = True
                try:
                    progress(count)
                finally:
                    self._is_reading = False

        if self.plan.bound is not None:
            return self._read_bounded(tokens, note)
        self._make_room(len(tokens))
        return self._read(tokens, note)

    def _read_bounded(self, tokens: npt.NDArray[np.int64], note: Callable[[int], object]) -> Any:
        """Read tokens as `_read` does, and evict between chunks, so that caches of a planned size hold them."""
        for begin, end in split_chunks(len(tokens), self.plan.chunk_size):
            if begin:
                self._evict_if_due()
            self._free_room(end - begin)
            self._make_room(end - begin)
            logits = self._read(tokens[begin:end], note)
        return logits

    def _rooms(self) -> list[int]:
        """Return how many more tokens each full-attention cache takes as it is."""
        limit = self.plan.bound or self.plan.max_context
        return [min(self.cache_capacity(i), limit) - held for i, held in self._lengths.held().items()]

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

    def _restart(self, tokens: npt.NDArray[np.int64], variant: int, progress: Callable[[int], object] | None) -> Any:
        """Read the whole sequence again with the frequencies of its new length, as transformers does."""
        if self._lengths.evicted_at:
            raise CapacityError(
                f"past {self._manifest.rope_limits[self._variant]} tokens this model rotates all keys anew, "
                "but some were evicted; start a session whose first prompt is that long"
            )
        everything = np.concatenate([np.array(self._history, np.int64), tokens])
        with self._reading_again():
            self._lengths.clear()
            self._history.clear()
            self._variant = variant
            return self._read_on(everything, progress)

    @contextlib.contextmanager
    def _reading_again(self) -> Iterator[None]:
        """Let tokens that count as read be read again; where that ends early, the sequence is shorter than it was."""
        try:
            yield
        except BaseException:
            self._settle()
            self._pending.clear()  # it would follow tokens that are gone
            raise

    @contextlib.contextmanager
    def _ending_at_what_was_read(self) -> Iterator[None]:
        """Let given tokens be read; where that ends early, all that no chunk read is the caller's to give again."""
        try:
            yield
        except CapacityError:  # nothing was read, or the token that waited was
            raise
        except BaseException:
            self._pending.clear()
            raise

    def _make_room(self, count: int) -> None:
        """Grow full-attention caches: those that an eviction had shrunk, and paged ones."""
        held = self._lengths.held()
        slots = {i: self.cache_capacity(i) for i in held}
        slots |= {i: self._grown(i, n + count) for i, n in held.items() if n + count > slots[i]}
        self._caches.fit(slots, held)

    def _grown(self, index: int, needed: int) -> int:
        """Return the slots that a full-attention cache of `needed` tokens gets."""
        return max(self.plan.grown_capacity(index, needed), self._manifest.sink + 1)

    def _check_layer(self, layer: int) -> None:
        whole_number("layer", layer, 0, len(self.plan.layers) - 1)
