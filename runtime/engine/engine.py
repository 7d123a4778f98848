"""Serves many requests with one model: submit prompts, read tokens as they come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ortolan.errors import ConfigError, finite_number, truth, whole_number
from ortolan.manifest import Manifest
from ortolan.policies import Eviction
from ortolan.runtime.caches.page_archive import PageArchive
from ortolan.runtime.caches.plan import CachePlan
from ortolan.runtime.engine.archive import PrefixArchive
from ortolan.runtime.engine.archive_options import DISK_CACHE_BYTES, ArchiveOptions
from ortolan.runtime.engine.beginnings import Beginnings
from ortolan.runtime.engine.core import EngineCore
from ortolan.runtime.engine.memory import EngineMemory, count_memory
from ortolan.runtime.engine.pool_caches import PoolCaches
from ortolan.runtime.engine.request import Request
from ortolan.runtime.engine.scheduler import Scheduler, check_fits
from ortolan.runtime.engine.sequence import TokenSequence
from ortolan.runtime.engine.stats import EngineStats
from ortolan.runtime.engine.stream import Outbox, Stream
from ortolan.runtime.engine.worker import Worker
from ortolan.runtime.eviction.graphs import check_eviction, one_eviction
from ortolan.runtime.eviction.second_reader import room_behind
from ortolan.runtime.generate.stops import Stops
from ortolan.runtime.generate.turn import TurnOptions
from ortolan.runtime.model import Model
from ortolan.runtime.options import Sampling
from ortolan.runtime.saved.fingerprint import Fingerprint
from ortolan.runtime.speculation.drafter import Drafter, Speculator, token_cost
from ortolan.runtime.speculation.options import Speculation, check_speculation
from ortolan.runtime.speculation.pools import DraftLimits, DraftPools
from ortolan.runtime.steps.layout import check_token_ids
from ortolan.runtime.steps.stepper import Stepper
from ortolan.runtime.text.so_far import TextSoFar
from ortolan.runtime.text.tokenizer import Detokenize


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of.

    Attributes:
        manifest: of the model.
        plan: of the pools.
        stepper: runs steps over them.
        pools: what else is done with them.
        check_eviction: refuses eviction options that the model has no graph for, by ConfigError, in whatever thread.
        detokenize: starts to decode token ids. Raises ConfigError where there is no tokenizer.
        identify: says what model this is, for saved sequences.
        batch_invariant: whether the model was loaded so.
        prepare_drafter: returns what makes a drafter over given caches. Raises ConfigError where the model cannot have
            it.
        archive: takes copies of prefixes; None: none are kept.
    """

    manifest: Manifest
    plan: CachePlan
    stepper: Stepper
    pools: PoolCaches
    check_eviction: Callable[[Eviction | None], None]
    detokenize: Detokenize
    identify: Callable[[], Fingerprint]
    batch_invariant: bool
    prepare_drafter: Callable[[Speculation, DraftPools], Callable[[], Drafter]]
    archive: PageArchive | None = None


class Engine:
    """Runs many requests at once: each step feeds one token of every running request and a part of new prompts.

    One thread of the engine's own runs all steps, and no other thread uses the model meanwhile. You may use `submit`,
    streams and `cancel` from any thread and any event loop. Close the engine, or use it as a context manager;
    unfinished requests then fail with EngineClosedError. An engine closes itself once nothing refers to it or to one of
    its streams.
    """

    def __init__(
        self,
        model: Model,
        max_sequences: int = 16,
        max_cache_bytes: int | None = None,
        chunk_tokens: int | None = None,
        *,
        max_context: int | None = None,
        overcommit: float = 1.0,
        max_draft_bytes: int | None = None,
        host_cache_bytes: int = 0,
        disk_cache: str | Path | None = None,
        disk_cache_bytes: int = DISK_CACHE_BYTES,
    ) -> None:
        """Allocate the page pools and start the thread.

        Args:
            model: a paged one.
            max_sequences: most requests that run at once; others wait.
            max_cache_bytes: of all page pools together; None takes what `max_sequences` of the longest sequences
                need, on CUDA at most four fifths of the free memory.
            chunk_tokens: most tokens of one step, prompts' and generated ones, or `max_sequences` where that is more:
                each decode gets its token, and a prompt at least one. None takes the export's chunk size.
            max_context: longest sequence, tokens; None takes the export's.
            overcommit: how many times over pages may be promised. At 1 an admitted request always has its pages;
                above, the youngest gives its own back when they run out, and reads its tokens again later.
            max_draft_bytes: of the caches of each draft model or head, which are allocated when one drafts first; None
                takes what as many tokens need as the page pools hold, on CUDA at most half of the free memory. Where
                they are full, a request goes on without drafts.
            host_cache_bytes: of copies of prefixes in host memory, which come back where later prompts begin so and the
                pages have been given to others.
            disk_cache: folder for such copies, which other engines of the same model read, too; None: no files.
            disk_cache_bytes: of the files of this model.

        Raises:
            ConfigError: the model is not paged, a number is not allowed, the folder cannot be used, or no two sequences
                of the model can share a prefix.
            CapacityError: the bytes hold no sequence, or there is no memory for them.
        """
        if not isinstance(model, Model):
            raise ConfigError(f"model is {model!r}; it must be what ortolan.load returns")
        share = finite_number(overcommit)
        if share is None or share < 1.0:
            raise ConfigError(f"overcommit is {overcommit!r}; it must be a number, at least 1")
        if max_draft_bytes is not None:
            max_draft_bytes = whole_number("max_draft_bytes", max_draft_bytes)
        archived = ArchiveOptions.of(host_cache_bytes, disk_cache, disk_cache_bytes)
        plan = model.plan_engine(max_sequences, max_cache_bytes, chunk_tokens, max_context)
        pages = archived.open(plan, model)
        store, stepper = model.pool_stepper(plan)
        pools = PoolCaches(store, plan, model.evictions, lambda: model.fingerprint)
        parts = EngineParts(
            manifest=model.manifest,
            plan=plan,
            stepper=stepper,
            pools=pools,
            check_eviction=model.evictions.check,
            detokenize=model.detokenize,
            identify=lambda: model.fingerprint,
            batch_invariant=model.batch_invariant,
            prepare_drafter=lambda speculation, drafts: _prepare_drafter(speculation, model, drafts),
            archive=pages,
        )
        self._start(parts, share, max_draft_bytes)

    @classmethod
    def of(cls, parts: EngineParts, overcommit: float = 1.0) -> Engine:
        """Make an engine whose steps run elsewhere than in a model."""
        engine = cls.__new__(cls)
        engine._start(parts, overcommit)
        return engine

    def _start(self, parts: EngineParts, overcommit: float, max_draft_bytes: int | None = None) -> None:
        self.plan = parts.plan
        self._parts = parts
        self._beginnings = Beginnings(
            manifest=parts.manifest, plan=parts.plan, identify=parts.identify, detokenize=parts.detokenize
        )
        self._drafts = DraftPools(parts.plan.max_context, DraftLimits.of(parts.plan, max_draft_bytes))
        scheduler, archive = Scheduler(parts.plan, overcommit), None
        if parts.archive is not None:
            archive = PrefixArchive(parts.archive, scheduler.prefixes, parts.pools, parts.plan)
        core = EngineCore(scheduler, parts.stepper, parts.pools, self._drafts, archive)
        self.worker = Worker(core)
        self._finalizer = weakref.finalize(self, self.worker.stop)

    def submit(
        self,
        token_ids: Sequence[int] | npt.NDArray[Any],
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        stop: Stops = (),
        ignore_eos: bool = False,
        snapkv: Eviction | None = None,
        eviction: Eviction | None = None,
        logprobs: int | None = None,
        session: str | Path | None = None,
        speculation: Speculation | None = None,
    ) -> Stream:
        """Ask for the tokens that follow a prompt; returns at once.

        Args:
            token_ids: [T], at least one.
            max_new_tokens: the most to generate.
            sampling: how tokens are chosen; None takes the most likely.
            stop: texts, token ids and sequences of these, or one text or id, that end the request. They are not
                yielded, nor is a token in which a text begins; `Stream.text` has what comes before it.
            ignore_eos: generate past end-of-sequence tokens.
            snapkv: the same as `eviction`.
            eviction: after the prompt; None never evicts. Its pages beyond the budget become free then. A prompt after
                a saved session that is shorter than the window is scored with fewer queries where the file lacks them.
            logprobs: how many most likely tokens come with each token's log-probability, in `Stream.logprobs`; None: no
                log-probabilities.
            session: file of a saved session or request, whose sequence the prompt follows; None begins a new one.
            speculation: who drafts tokens, as in `Session.generate`; a drafter that fails drafts no more, and the log
                says so.

        Raises:
            ConfigError: no tokens, ids outside the vocabulary, an option that is not allowed or that the model has no
                eviction graph for, or a text in `stop` where the model has no tokenizer.
            ContextLengthError: the prompt is longer than `max_context`.
            CapacityError: it could not finish in the whole pool.
            SessionFileError, ContractMismatchError: the file cannot be read, or another model wrote it.
            EngineClosedError: the engine is closed.
        """
        options = one_eviction(eviction, snapkv)
        self._check_eviction(options)
        speculator = self._speculator(speculation)
        given: list[int] = check_token_ids(token_ids, self._parts.manifest.vocab_size).tolist()
        turn = self._beginnings.turn(
            TurnOptions(
                sampling=sampling,
                max_new_tokens=max_new_tokens,
                eos_token_ids=frozenset(() if truth("ignore_eos", ignore_eos) else self._parts.manifest.eos_token_ids),
                stop=stop,
                logprobs=logprobs,
                context=given,
            )
        )
        saved = None if session is None else self._beginnings.open(session)
        sequence = self._beginnings.sequence(given, options, saved)
        request = Request(
            sequence=sequence,
            turn=turn,
            max_context=self.plan.max_context,
            outbox=Outbox(),
            saved=saved,
            speculator=speculator,
        )
        return self._submit(request, len(given), turn.start_text())

    def restore(
        self, path: str | Path, max_new_tokens: int | None = None, *, speculation: Speculation | None = None
    ) -> Stream:
        """Go on with the generation of a saved session or request, as if it had never been left.

        Args:
            path: of the file; nothing is changed, so that it can be restored again.
            max_new_tokens: how many more at most; None: what is left of the number that it was asked for.
            speculation: as in `submit`.

        Returns:
            The tokens that come now; those before are not repeated.

        Raises:
            ConfigError: max_new_tokens is below 1, or the file does not contain a generation that can go on.
            SessionFileError: the file cannot be read, is not a saved session, or is truncated or altered.
            ContractMismatchError: another model or another version of the format wrote it.
            CapacityError: it could not finish in the whole pool.
            EngineClosedError: the engine is closed.
        """
        if max_new_tokens is not None:
            max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
        speculator = self._speculator(speculation)
        saved = self._beginnings.open(path)
        taken = self._beginnings.take_up(saved, path, max_new_tokens)
        if taken.outbox.is_ended:
            saved.close()
            return Stream(taken.outbox, 0, taken.text, lambda: None, lambda path: None, None)
        request = Request(
            sequence=taken.sequence,
            turn=taken.turn,
            max_context=self.plan.max_context,
            outbox=taken.outbox,
            saved=saved,
            speculator=speculator,
        )
        return self._submit(request, 0, taken.text)

    def stats(self) -> EngineStats:
        """Return what was done so far."""
        return self.worker.ask(lambda core: core.stats())

    def memory(self) -> EngineMemory:
        """Return who holds how many bytes between two steps."""
        return self.worker.ask(count_memory)

    def close(self) -> None:
        """End all requests and the thread, and free the pools; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_eviction(self, options: Eviction | None) -> None:
        check_eviction(options, self._parts.manifest)
        self._parts.check_eviction(options)
        if options is not None and options.during_prefill:
            raise ConfigError("eviction: an engine evicts after the prompt; during_prefill is for sessions")

    def _reread_room(self, sequence: TokenSequence) -> int:
        """Return the tokens behind a prompt that its eviction's second reading takes.

        Raises:
            CapacityError: there are too few positions.
            ConfigError: pieces would be cut otherwise than elsewhere, which a batch-invariant model must not do.
        """
        reading = sequence.eviction.second_reading if sequence.eviction and sequence.will_evict else None
        if reading is None:
            return 0
        room = room_behind(sequence.prompt_length, reading, self.plan, self._parts.manifest)
        if self._parts.batch_invariant and room < min(reading.step_tokens, sequence.prompt_length):
            raise ConfigError(
                f"the eviction reads pieces of {reading.step_tokens} tokens again, lead included, and what it keeps "
                f"depends on them, but a step has room for {room} behind this prompt; with batch_invariant=True raise "
                "chunk_tokens or max_context, or lower the eviction's piece"
            )
        return room

    def _speculator(self, speculation: Speculation | None) -> Speculator | None:
        options = check_speculation(speculation)
        if options is None:
            return None
        return Speculator(
            self._parts.prepare_drafter(options, self._drafts),
            options,
            self._parts.manifest.vocab_size,
            token_cost(self._parts.stepper, self.plan.max_sequences),
        )

    def _submit(self, request: Request, prompt_tokens: int, text: TextSoFar) -> Stream:
        sequence, turn = request.sequence, request.turn
        sequence.max_length = min(len(sequence.tokens) + turn.max_new_tokens - turn.count - 1, self.plan.max_context)
        try:
            self.worker.check()
            sequence.reread_room = self._reread_room(sequence)
            check_fits(self.plan, sequence)
            self.worker.send(lambda core: core.add(request))
        except BaseException:
            request.close()
            raise
        return Stream(  # a stream keeps its engine alive
            request.outbox,
            prompt_tokens,
            text,
            lambda: self.worker.cancel(request),
            lambda path: self.worker.ask(lambda core: core.save(request, path)),
            None if request.speculator is None else request.speculator.stats,
        )


def _prepare_drafter(speculation: Speculation, model: Model, drafts: DraftPools) -> Callable[[], Drafter]:
    """Check a drafter now, and return what makes it: in the thread that drafts, once its request has started."""
    speculation.check(model)
    return lambda: speculation.join(model, drafts)
