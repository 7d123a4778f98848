"""Serves many requests with one model: submit prompts, read tokens as they come."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy.typing as npt

from ortolan.errors import (
    ConfigError,
    ContextLengthError,
    ContractMismatchError,
    EngineClosedError,
    OrtolanError,
    RequestCancelledError,
    finite_number,
    truth,
    whole_number,
)
from ortolan.manifest import Manifest
from ortolan.policies import Eviction
from ortolan.runtime.batch_stepper import BatchStepper
from ortolan.runtime.engine_core import EngineCore, EngineStats
from ortolan.runtime.engine_plan import EnginePlan
from ortolan.runtime.model import EvictionCheck, Model
from ortolan.runtime.options import Sampling, check_eviction, check_sampling
from ortolan.runtime.request import Request, make_choice
from ortolan.runtime.scheduler import Scheduler, check_fits
from ortolan.runtime.sequence import TokenSequence
from ortolan.runtime.step_inputs import check_token_ids
from ortolan.runtime.stops import StopFilter, Stops
from ortolan.runtime.stream import Outbox, Stream
from ortolan.runtime.tokenizer import DetokenizerStream, Tokenizer

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes of an engine's page pools. `held_bytes`, `kept_bytes` and `free_bytes` add up to `pool_bytes`.

    Attributes:
        pool_bytes: allocated once, for all pools.
        held_bytes: of pages that requests hold.
        kept_bytes: of pages that nobody holds, kept for prompts that begin as they do.
        free_bytes: of the other pages.
    """

    pool_bytes: int
    held_bytes: int
    kept_bytes: int
    free_bytes: int


class Engine:
    """Runs many requests at once: each step feeds one token of every running request and a part of new prompts.

    One thread of the engine's own runs all steps, so that the model is used by no other thread meanwhile; `submit`,
    streams and `cancel` may be used from any thread and any event loop. Close the engine, or use it as a context
    manager; requests that are unfinished then fail with EngineClosedError. An engine that nobody refers to any more,
    through a stream neither, closes itself.
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
    ) -> None:
        """Allocate the page pools and start the thread.

        Args:
            model: a paged one.
            max_sequences: most requests that run at once; others wait.
            max_cache_bytes: of all page pools together; None takes what `max_sequences` of the longest sequences
                need, on CUDA at most most of the free memory.
            chunk_tokens: most tokens of one step, prompts' and generated ones, or `max_sequences` where that is more:
                each decode gets its token, and a prompt at least one. None takes the export's chunk size.
            max_context: longest sequence, tokens; None takes the export's.
            overcommit: how many times over pages may be promised. At 1 an admitted request always has its pages;
                above, the youngest gives its own back when they run out, and reads its tokens again later.

        Raises:
            ConfigError: the model is not paged, or a number is not allowed.
            CapacityError: the bytes hold no sequence, or there is no memory for them.
        """
        if not isinstance(model, Model):
            raise ConfigError(f"model is {model!r}; it must be what ortolan.load returns")
        share = finite_number(overcommit)
        if share is None or share < 1.0:
            raise ConfigError(f"overcommit is {overcommit!r}; it must be a number, at least 1")
        plan = model.plan_engine(max_sequences, max_cache_bytes, chunk_tokens, max_context)
        check = model.snapkv_check()
        self._start(model.manifest, plan, model.batch_stepper(plan), share, check, lambda: model.tokenizer)

    @classmethod
    def _of(
        cls,
        manifest: Manifest,
        plan: EnginePlan,
        stepper: BatchStepper,
        overcommit: float = 1.0,
        *,
        tokenizer: Tokenizer | None = None,
    ) -> Engine:
        """Make an engine whose steps run elsewhere than in a model."""
        engine = cls.__new__(cls)
        engine._start(
            manifest, plan, stepper, overcommit, lambda snapkv: check_eviction(snapkv, manifest), lambda: tokenizer
        )
        return engine

    def _start(
        self,
        manifest: Manifest,
        plan: EnginePlan,
        stepper: BatchStepper,
        overcommit: float,
        check: EvictionCheck,
        tokenizer: Callable[[], Tokenizer | None],
    ) -> None:
        self.plan = plan
        self._manifest = manifest
        self._check_snapkv, self._tokenizer = check, tokenizer
        self._numbers = itertools.count()
        self._worker = Worker(EngineCore(Scheduler(plan, overcommit), stepper))
        self._finalizer = weakref.finalize(self, self._worker.stop)

    def submit(
        self,
        token_ids: Sequence[int] | npt.NDArray[Any],
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        stop: Stops = (),
        ignore_eos: bool = False,
        snapkv: Eviction | None = None,
    ) -> Stream:
        """Ask for the tokens that follow a prompt; returns at once.

        Args:
            token_ids: [T], at least one.
            max_new_tokens: the most to generate.
            sampling: how tokens are chosen; None takes the most likely.
            stop: texts, token ids and sequences of these, or one text or id, that end the request. They are not
                yielded, nor is a token in which a text begins; `Stream.text` has what comes before it.
            ignore_eos: generate past end-of-sequence tokens.
            snapkv: eviction after the prompt; None never evicts. Its pages beyond the budget become free then.

        Raises:
            ConfigError: no tokens, ids outside the vocabulary, an option that is not allowed or that the model has no
                eviction graph for, or a text in `stop` where the model has no tokenizer.
            ContextLengthError: the prompt is longer than `max_context`.
            CapacityError: it could not finish in the whole pool.
            EngineClosedError: the engine is closed.
        """
        tokens = self._checked(token_ids)
        max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
        self._check_snapkv(snapkv)
        if snapkv is not None and snapkv.during_prefill:
            raise ConfigError("snapkv: an engine evicts after the prompt; during_prefill is for sessions")
        stops = StopFilter(stop, self._manifest.vocab_size, self._detokenize)
        options, outbox, context = check_sampling(sampling), Outbox(), self.plan.max_context
        sequence = TokenSequence(
            number=next(self._numbers),
            tokens=tokens,
            prompt_length=len(tokens),
            max_length=min(len(tokens) + max_new_tokens - 1, context),
            snapkv=snapkv,
        )
        check_fits(self.plan, sequence)
        request = Request(
            sequence=sequence,
            choice=make_choice(options, tokens),
            stops=stops,
            eos_token_ids=frozenset(() if truth("ignore_eos", ignore_eos) else self._manifest.eos_token_ids),
            max_new_tokens=max_new_tokens,
            max_context=context,
            outbox=outbox,
        )
        self._worker.send(lambda core: core.add(request))
        return Stream(outbox, len(tokens), lambda: self._worker.cancel(request))  # a stream keeps its engine alive

    def stats(self) -> EngineStats:
        """Return what was done so far."""
        return self._worker.ask(lambda core: core.stats())

    def memory(self) -> EngineMemory:
        """Return who holds how many bytes between two steps."""
        return self._worker.ask(_count_memory)

    def close(self) -> None:
        """End all requests and the thread, and free the pools; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _detokenize(self) -> DetokenizerStream:
        try:
            tokenizer = self._tokenizer()
        except ContractMismatchError as error:
            raise ConfigError(f"stop holds a text, but {error}") from error
        if tokenizer is None:
            raise ConfigError("stop holds a text, but there is no tokenizer; use token ids")
        return tokenizer.stream()

    def _checked(self, token_ids: Sequence[int] | npt.NDArray[Any]) -> list[int]:
        given, context = check_token_ids(token_ids, self._manifest.vocab_size), self.plan.max_context
        if given.size > context:
            raise ContextLengthError(
                f"the prompt has {given.size} tokens, more than max_context = {context}; shorten it, or make the "
                "engine with a larger max_context"
            )
        tokens: list[int] = given.tolist()
        return tokens


def _count_memory(core: EngineCore) -> EngineMemory:
    scheduler = core.scheduler
    bytes_of = {kind.name: kind.page_bytes for kind in scheduler.plan.kinds}
    pools = scheduler.pools.values()
    return EngineMemory(
        pool_bytes=core.stepper.cache_bytes,
        held_bytes=sum(pool.held * bytes_of[pool.name] for pool in pools),
        kept_bytes=sum(pool.kept * bytes_of[pool.name] for pool in pools),
        free_bytes=sum(pool.free * bytes_of[pool.name] for pool in pools),
    )


class Worker:
    """The thread that runs a core's steps; others reach the core by sending it functions to call."""

    def __init__(self, core: EngineCore) -> None:
        self._calls: deque[Callable[[EngineCore], object]] = deque()
        self._condition = threading.Condition()  # reentrant: a stream may be collected anywhere
        self._closed = ""  # why, once it is
        self._stopping = False
        self._core: EngineCore | None = core
        self._thread = threading.Thread(target=self._work, name="ortolan-engine", daemon=True)
        self._thread.start()

    def send(self, call: Callable[[EngineCore], object]) -> None:
        """Let the thread call a function before its next step. Raises EngineClosedError."""
        with self._condition:
            if self._closed or self._stopping:
                raise EngineClosedError(self._closed or "the engine is closed")
            self._calls.append(call)
            self._condition.notify()

    def cancel(self, request: Request) -> None:
        """End a request, unless it or the engine has ended."""
        with self._condition:
            if not self._closed and not self._stopping:
                self.send(lambda core: core.cancel(request, RequestCancelledError("the request was cancelled")))

    def ask(self, call: Callable[[EngineCore], Answer]) -> Answer:
        """Let the thread call a function, and return what it returns. Raises EngineClosedError."""
        answers: deque[Answer] = deque()
        answered = threading.Event()

        def answer(core: EngineCore) -> None:
            answers.append(call(core))
            answered.set()

        self.send(answer)
        while not answered.wait(timeout=1.0):
            if not self._thread.is_alive() and not answered.is_set():
                raise EngineClosedError(self._closed or "the engine is closed")
        return answers.popleft()

    def stop(self) -> None:
        """End all requests and the thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        core = self._core
        assert core is not None
        closed, error = "the engine is closed", EngineClosedError("the engine was closed before the request ended")
        try:
            while self._take_calls(core):
                core.step()
        except Exception as failure:  # whatever it is, every reader must learn of it
            closed = f"the engine is closed, as it failed: {failure!r}"
            error = EngineClosedError(f"the engine failed: {failure!r}")
            error.__cause__ = failure
        with self._condition:
            self._closed = closed
            self._run_calls(core)
            core.cancel_all(error)
            self._core = None
        with contextlib.suppress(OrtolanError):  # a device that failed has told every reader already
            core.stepper.close()

    def _take_calls(self, core: EngineCore) -> bool:
        """Run the functions sent, waiting for some where there is nothing else to do; False: stop."""
        with self._condition:
            while not (self._calls or self._stopping or core.is_busy):
                self._condition.wait()
            if self._stopping:
                return False
        self._run_calls(core)
        return True

    def _run_calls(self, core: EngineCore) -> None:
        while self._calls:
            self._calls.popleft()(core)
