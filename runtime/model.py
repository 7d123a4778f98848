"""An open model, which makes sessions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ortolan.errors import (
    CapacityError,
    ConfigError,
    ContractMismatchError,
    file_path,
    whole_number,
)
from ortolan.hub import model_folder
from ortolan.manifest import HEAD_FILE, MODEL_FILE, Manifest
from ortolan.policies import Eviction
from ortolan.runtime.assembly import make_session, make_store_stepper
from ortolan.runtime.caches.plan import CachePlan, plan_caches, plan_pools
from ortolan.runtime.caches.store import CacheStore
from ortolan.runtime.device.host_tables import give_layer_table
from ortolan.runtime.device.memory import DeviceMemory, estimate_chunk_bytes, fit_chunk
from ortolan.runtime.device.opening import NO_WEIGHTS, Device
from ortolan.runtime.device.shared_weights import give_shared_weights
from ortolan.runtime.eviction.graphs import EvictionGraphs, GraphBuilders, GraphChanges, check_eviction, one_eviction
from ortolan.runtime.generate.stops import Stops
from ortolan.runtime.graph_check import check_graph
from ortolan.runtime.options import Sampling
from ortolan.runtime.ownership import Process
from ortolan.runtime.saved.fingerprint import Fingerprint, take_fingerprint
from ortolan.runtime.saved.reader import SavedSequence
from ortolan.runtime.session import Progress, Session
from ortolan.runtime.speculation.options import Speculation, check_same_vocabulary
from ortolan.runtime.steps.cuts import Cuts
from ortolan.runtime.steps.layout import TokenIds, check_token_ids
from ortolan.runtime.steps.stepper import Decoder, Stepper
from ortolan.runtime.text.generation_config import read_sampling
from ortolan.runtime.text.streaming import TextStream, prompt_ids
from ortolan.runtime.text.tokenizer import DetokenizerStream, Tokenizer

POOL_SHARE = 0.8  # of the free device memory, for an engine's page pools where nothing else is said

_log = logging.getLogger(__name__)


class Model:
    """An exported model, ready to make sessions; made by `load`.

    Attributes:
        folder: of the model.
        manifest: what the runtime knows of the graph.
        device: where it runs.
        decoder: the graph.
        evictions: the eviction graphs.
        memory: what holds how many bytes on the device.
        batch_invariant: whether rows of a step have the same bits whatever stands beside them.
        cuts: where sequences may be cut into steps.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        device: Device,
        builders: GraphBuilders,
        fused: bool | None,
        *,
        host_embeddings: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        """Open the decoder graph. Arguments and errors as of `load`."""
        self.folder, self.manifest, self.device = folder, manifest, device
        self.batch_invariant = batch_invariant
        self.cuts = Cuts(by_family=batch_invariant and device.cuda is not None)
        self._process = Process()
        self.evictions = EvictionGraphs(folder, manifest, device, builders)
        self._tokenizer: Tokenizer | None = None
        self._draft_models: dict[str, Model] = {}
        self.memory = DeviceMemory(device, manifest)
        self._head: Decoder | None = None
        file_name = self._choose_file(fused)
        self._builders = builders
        self._changes = GraphChanges(manifest=manifest, batch_invariant=batch_invariant, cuda=device.cuda is not None)
        self._is_fused = file_name != MODEL_FILE
        weights, hosted = give_layer_table(folder / file_name, device.buffers) if host_embeddings else ({}, 0)
        self.memory.host_embedding_bytes = hosted
        self._shared: dict[str, Any] = {}  # weights of the draft head, too
        if manifest.draft_head is not None:
            self._shared, self.memory.shared_weight_bytes = give_shared_weights(folder / HEAD_FILE, device.buffers)
        self.decoder = self._open_graph(file_name, manifest, weights | self._shared)
        self.memory.note_weights()
        _log.info("opened %s on %s: %s, %s", folder / file_name, device.name, manifest.architecture, manifest.dtype)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model folder.

        Raises:
            ContractMismatchError: the folder has none, or its files are damaged.
        """
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.folder)
        return self._tokenizer

    @functools.cached_property
    def recommended_sampling(self) -> Sampling:
        """How the model's authors sample from it; see `Sampling.from_model`."""
        return read_sampling(self.folder)

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """What identifies the model to saved sessions; see `take_fingerprint` for what it covers."""
        return take_fingerprint(self.folder, self.manifest)

    def plan(
        self,
        max_context: int | None = None,
        chunk_size: int | None = None,
        snapkv: Eviction | None = None,
        *,
        eviction: Eviction | None = None,
    ) -> CachePlan:
        """Plan the caches of a session without making it. Arguments and errors are those of `session`."""
        options = one_eviction(eviction, snapkv)
        check_eviction(options, self.manifest)
        budget = options.budget if options and options.during_prefill else None
        if budget is not None and self.batch_invariant:
            raise ConfigError(
                "eviction: with during_prefill=True what is kept depends on how the prompt is cut, which a model that "
                "was loaded with batch_invariant=True does not allow; leave one of them out"
            )
        again = options.second_reading if options else None
        plan = plan_caches(
            self.manifest,
            max_context,
            chunk_size,
            cuda=self.device.cuda is not None,
            budget=budget,
            reread_tokens=again.step_tokens if again else 0,
        )
        if plan.chunk_size < plan.max_context:
            self.cuts.check("chunk_size", plan.chunk_size)
        if again and self.batch_invariant and plan.chunk_size < min(again.step_tokens, plan.max_context):
            raise ConfigError(
                f"chunk_size is {plan.chunk_size}; the eviction reads pieces of {again.step_tokens} tokens again, lead "
                "included, and what it keeps depends on them, which a model that was loaded with batch_invariant=True "
                "does not allow; raise chunk_size, or lower the eviction's piece"
            )
        return dataclasses.replace(plan, cuts=self.cuts)

    def session(
        self,
        max_context: int | None = None,
        chunk_size: int | None = None,
        snapkv: Eviction | None = None,
        *,
        eviction: Eviction | None = None,
    ) -> Session:
        """Start a sequence with caches of its own.

        Args:
            max_context: longest sequence, tokens; at most the export's, which None takes.
            chunk_size: most tokens of one prefill step. None takes the export's; where that was not chosen either,
                sessions on CUDA whose caches do not grow with it read up to 16384, as memory allows.
            snapkv: the same as `eviction`.
            eviction: of full-attention caches, `ortolan.Eviction` or `ortolan.SnapKv`; None never evicts.

        Raises:
            ConfigError: a number is not allowed, the model was exported without eviction, or both options are given.
            CapacityError: there is no memory for the caches, or on CUDA for reading a chunk.
        """
        self._process.check("a model")
        options = one_eviction(eviction, snapkv)
        plan = self.plan(max_context, chunk_size, options)
        return make_session(self, plan if chunk_size else self._fitting(plan, options), options)

    def stream(
        self,
        prompt: str | TokenIds,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        progress: Progress = None,
        stop: Stops = (),
        snapkv: Eviction | None = None,
        eviction: Eviction | None = None,
        speculation: Speculation | None = None,
    ) -> Iterator[str]:
        """Read a prompt in a session of its own, just large enough, and return an iterator over the text that follows.

        The session is gone once the text is out, or nobody refers to the iterator any more.

        Args:
            prompt: a text, or token ids [T].
            max_new_tokens: the most tokens to generate; where prompt and text are longer than the model reads, fewer.
            sampling: how tokens are chosen; None takes the most likely.
            progress: as in `Session.prefill`.
            stop: as in `Session.generate`.
            snapkv: the same as `eviction`.
            eviction: as in `session`.
            speculation: as in `Session.generate`.

        Raises:
            ContractMismatchError: the model has no tokenizer.
            ConfigError, CapacityError: as `session` and `Session.stream_text`.
        """
        token_ids = prompt_ids(self.tokenizer, prompt, is_first=True)
        tokens = check_token_ids(token_ids, self.manifest.vocab_size)
        longest = len(tokens) + whole_number("max_new_tokens", max_new_tokens) - 1
        session = self.session(min(max(1, longest), self.manifest.max_context), snapkv=snapkv, eviction=eviction)
        text = session.stream_text(
            tokens,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            progress=progress,
            stop=stop,
            speculation=speculation,
        )
        return _pieces(text)

    def restore(
        self,
        path: str | Path,
        max_context: int | None = None,
        chunk_size: int | None = None,
        *,
        snapkv: Eviction | None = None,
        eviction: Eviction | None = None,
    ) -> Session:
        """Make a session from the file that `Session.save` wrote, which goes on as the saved one would have.

        On the device and with the lengths that it was saved with, it goes on bit for bit.

        Args:
            path: of the file; nothing is changed, so that it can be restored again.
            max_context: longest sequence, tokens; None takes the saved session's.
            chunk_size: most tokens of one prefill step; None takes the saved session's.
            snapkv: the same as `eviction`.
            eviction: how the restored session evicts; None takes the saved options.

        Raises:
            SessionFileError: the file cannot be read, is not a saved session, or is truncated or altered.
            ContractMismatchError: another model or another version of the format wrote it.
            ConfigError: a number is not allowed, or max_context is less than what was read.
            CapacityError: there is no memory for the caches.
        """
        self._process.check("a model")
        given = one_eviction(eviction, snapkv)
        with contextlib.closing(SavedSequence(file_path("path", path))) as saved:
            saved.check_model(self.fingerprint, self.manifest)
            options = saved.eviction if given is None else given
            context = saved.max_context if max_context is None else max_context
            plan = self.plan(context, saved.chunk_size if chunk_size is None else chunk_size, options)
            capacities = saved.capacities(plan, self.manifest.sink)
            if chunk_size is None:
                plan = self._fitting(plan, options, capacities)
            session = make_session(self, plan, options, capacities)
            saved.load(session.state, session.feeder.caches, plan, self.manifest)
            session.take_up(saved.generation, saved.finish_reason)
        return session

    def plan_engine(
        self,
        max_sequences: int,
        max_cache_bytes: int | None = None,
        chunk_tokens: int | None = None,
        max_context: int | None = None,
    ) -> CachePlan:
        """Plan the page pools of an engine without making it; arguments and errors as of `Engine`."""
        cuda = self.device.cuda

        def fitting(max_bytes: int | None) -> CachePlan:
            on_cuda = cuda is not None
            found = plan_pools(self.manifest, max_sequences, max_bytes, chunk_tokens, max_context, cuda=on_cuda)
            self.cuts.check("chunk_tokens", found.chunk_size, max_sequences)
            return dataclasses.replace(found, cuts=self.cuts)

        plan = fitting(max_cache_bytes)
        if cuda is None or max_cache_bytes is not None:
            return plan
        free, _ = self.memory.free_memory()
        scratch = self.memory.scratch_bytes(plan)
        most = int((free - scratch - estimate_chunk_bytes(self.manifest, plan)) * POOL_SHARE)
        if plan.bytes <= most:
            return plan
        try:
            return fitting(max(1, most))
        except CapacityError as error:
            raise CapacityError(
                f"{self.device.name} has {free} bytes free, too few for an engine and {scratch} bytes of attention's "
                f"scratch memory; lower max_sequences or max_context: {error}"
            ) from error

    def pool_stepper(self, plan: CachePlan) -> tuple[CacheStore, Stepper]:
        """Allocate the page pools of an engine, and return them and what runs its steps. Raises CapacityError."""
        self._process.check("a model")
        self.memory.check_pools(plan)
        return make_store_stepper(self, plan)

    def draft_model(self, folder: str | Path) -> Model:
        """Open a smaller model that drafts for this one, on the same device; it stays open.

        Raises:
            ConfigError: its vocabulary is another one; besides, as `load`.
        """
        from ortolan.runtime.loading import load  # which makes models of this class

        place = str(model_folder(folder))
        if place not in self._draft_models:
            draft = load(place, device=self.device.name, num_threads=self.device.num_threads)
            check_same_vocabulary(self, draft)
            self._draft_models[place] = draft
        return self._draft_models[place]

    def draft_head(self) -> Decoder:
        """Open the model's draft head, once.

        Raises:
            ConfigError: it has none.
        """
        manifest = self.manifest.draft_head
        if manifest is None:
            raise ConfigError(
                f"{self.folder} has no draft head: its checkpoint had no mtp.* tensors when it was exported; "
                "choose ortolan.PromptLookup or ortolan.DraftModel"
            )
        if self._head is None:
            name = (manifest.fused_file(self._kind) if self._is_fused else None) or HEAD_FILE
            self._head = self._open_graph(name, manifest, self._shared)
        return self._head

    def detokenize(self, context: Sequence[int] = ()) -> DetokenizerStream:
        """Start to decode the token ids that follow a context.

        Raises:
            ConfigError: there is no tokenizer.
        """
        try:
            return self.tokenizer.stream(context)
        except ContractMismatchError as error:
            raise ConfigError(f"stop contains a text, but {error}; use token ids") from error

    def _fitting(self, plan: CachePlan, options: Eviction | None, capacities: list[int] | None = None) -> CachePlan:
        """Return the plan with chunks that there is memory for, where nobody chose their size."""
        if self.device.cuda is None or self.manifest.chunk_chosen:
            return plan

        def check(smaller: CachePlan) -> None:
            self.memory.check_room(smaller if capacities is None else smaller.with_capacities(capacities), options)

        return fit_chunk(plan, max(self.manifest.chunk_size, self.cuts.least_step), check)

    def _open_graph(self, file_name: str, manifest: Manifest, weights: Mapping[str, Any] = NO_WEIGHTS) -> Decoder:
        path, change = self.folder / file_name, self._builders.decoder if manifest is self.manifest else None
        graph = change(path, self._changes) if change else str(path)
        session = self.device.open(graph, self.folder, captures=True, weights=weights)
        check_graph(session, manifest, file_name)
        inputs = frozenset(each.name for each in (*session.get_inputs(), *session.get_overridable_initializers()))
        return Decoder(session, manifest, inputs, itertools.count(1), weights)

    def _choose_file(self, fused: bool | None) -> str:
        """Return the graph to open: the fused one of the device, where there is one, unless told otherwise."""
        name = self.manifest.fused_file(self._kind)
        if fused and not name:
            raise ConfigError(
                f"{self.folder} has no fused graph for {self._kind.upper()}; export the model again with fusion, or "
                "load it plain"
            )
        return name if name and fused is not False else MODEL_FILE

    @property
    def _kind(self) -> str:
        """The kind of the device: "cuda" or "cpu"."""
        return "cpu" if self.device.cuda is None else "cuda"


def _pieces(text: TextStream) -> Iterator[str]:
    """Yield the pieces of a text, and then let its session go."""
    yield from text
