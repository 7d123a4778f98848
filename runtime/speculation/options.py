"""What a caller may choose about speculation: who drafts, and how many tokens at most."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ortolan.element_types import element_type
from ortolan.errors import ConfigError, ContractMismatchError, file_path, whole_number
from ortolan.manifest import HEAD_WEIGHTS_FILE
from ortolan.runtime.device.memory import weight_file_bytes
from ortolan.runtime.speculation.pools import DraftPools

if TYPE_CHECKING:
    from ortolan.runtime.model import Model
    from ortolan.runtime.speculation.drafter import Drafter

SMALL_STEP = 1.5  # a small model's step takes longer than its share of the weights says: about what was measured
MOST_DRAFTED = 15  # and the token before them: steps of up to 16 tokens of a sequence are made for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Who drafts; a drafter of your own is a subclass.

    A draft is checked by one step of the model, which reads all of its tokens at once and chooses the token after each
    by the same rule and the same random numbers as without speculation. Its longest right beginning stays. So the
    tokens are those that the model would have chosen one by one, as far as a step of several tokens computes the same
    logits as several steps of one.

    Attributes:
        tokens: the most that are drafted in one step, 1 to 15; fewer where drafts turn out wrong.
        reads_hidden: whether the drafter takes the model's hidden states, and so is there before the prompt is read.
    """

    tokens: int = 4
    reads_hidden: ClassVar[bool] = False

    def __post_init__(self) -> None:
        given = whole_number(f"{type(self).__name__} tokens", self.tokens, 1, MOST_DRAFTED)
        object.__setattr__(self, "tokens", given)

    def check(self, model: Model) -> None:
        """Refuse a model that cannot have this drafter, by ConfigError."""

    def open(self, model: Model, max_context: int) -> Drafter:
        """Make what drafts for one sequence of a model, of at most `max_context` tokens.

        Raises:
            ConfigError: the model cannot have this drafter.
            CapacityError: there is no memory for it.
        """
        raise NotImplementedError

    def draft_cost(self, model: Model) -> float:
        """Return what it costs to draft one token, as a share of a step of the model; about, from their weights."""
        return 0.0

    def join(self, model: Model, pools: DraftPools) -> Drafter:
        """Make what drafts for one request of an engine, over caches that all of its requests share where it has any.

        Raises:
            NoDraftRoomError: these caches are full.
            ConfigError, CapacityError: as `open`.
        """
        return self.open(model, pools.max_context)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookup(Speculation):
    """Drafts what followed the sequence's last tokens where they stood before.

    It costs next to nothing, and is at its best where a text repeats parts of a long document.

    Attributes:
        tokens: the most that are drafted in one step, 1 to 15. By default a check has 8 rows, with the token before
            them: to so many, products on CUDA give the bits that they give to one.
        longest: the most last tokens that are looked up; the longest ones that are found count.
        shortest: the fewest.

    Raises:
        ConfigError: a number is not allowed.

    Source: Apoorv Saxena, "Prompt Lookup Decoding" (2023).
    """

    tokens: int = 7
    longest: int = 8
    shortest: int = 2

    def __post_init__(self) -> None:
        Speculation.__post_init__(self)
        object.__setattr__(self, "longest", whole_number("PromptLookup longest", self.longest, 1, 64))
        object.__setattr__(self, "shortest", whole_number("PromptLookup shortest", self.shortest, 1, self.longest))

    def open(self, model: Model, max_context: int) -> Drafter:
        """Make an index of one sequence."""
        from ortolan.runtime.speculation.lookup import LookupDrafter

        return LookupDrafter(self.longest, self.shortest)


@dataclass(frozen=True, slots=True)
class DraftModel(Speculation):
    """Drafts with a smaller model of the same vocabulary.

    It is opened once for each model that it drafts for, on the same device; every sequence has caches of its own. The
    requests of an engine share pools of pages and steps where the folder was exported with paged=True.

    Attributes:
        folder: of the smaller model, as `ortolan.load` takes it.

    Raises:
        ConfigError: a number is not allowed, or the folder has no name.
    """

    folder: str | Path

    def __post_init__(self) -> None:
        Speculation.__post_init__(self)
        file_path("DraftModel folder", self.folder)

    def check(self, model: Model) -> None:
        """Open the smaller model."""
        model.draft_model(self.folder)

    def draft_cost(self, model: Model) -> float:
        """Return the share of the smaller model's weights in the model's."""
        return _share(weight_file_bytes(model.draft_model(self.folder).manifest), model)

    def open(self, model: Model, max_context: int) -> Drafter:
        """Make caches for one sequence."""
        return self.join(model, DraftPools(max_context))

    def join(self, model: Model, pools: DraftPools) -> Drafter:
        """Take caches for one request."""
        from ortolan.runtime.speculation.draft_model import ModelDrafter

        draft = model.draft_model(self.folder)
        return ModelDrafter(pools.open(draft.decoder, draft.device.buffers), self.draft_cost(model))


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpHead(Speculation):
    """Drafts with the model's own head for multi-token prediction, which some checkpoints have (`mtp.*`).

    The head reads along with the model from the first generation that names it; what was read before stays unknown to
    it, which costs right drafts and nothing else. It has a key/value cache of its own, of one layer, that grows with
    the sequence.

    Raises:
        ConfigError: a number is not allowed.

    Source: DeepSeek-V3 (arXiv 2412.19437), and Qwen3-Next for the layout.
    """

    reads_hidden: ClassVar[bool] = True

    def check(self, model: Model) -> None:
        """Open the model's draft head."""
        model.draft_head()

    def draft_cost(self, model: Model) -> float:
        """Return the share of the head's weights, and of the output head that it has in common, in the model's."""
        manifest = model.manifest
        output_head = manifest.vocab_size * manifest.hidden_size * element_type(manifest.dtype).bytes
        return _share(manifest.files.get(HEAD_WEIGHTS_FILE, 0) + output_head, model)

    def open(self, model: Model, max_context: int) -> Drafter:
        """Make caches for one sequence."""
        return self.join(model, DraftPools(max_context))

    def join(self, model: Model, pools: DraftPools) -> Drafter:
        """Take caches for one request."""
        from ortolan.runtime.speculation.draft_head import HeadDrafter

        return HeadDrafter(pools.open(model.draft_head(), model.device.buffers), self.draft_cost(model))


def _share(weight_bytes: int, model: Model) -> float:
    """Return the cost of a step that reads so many weights, as a share of the model's."""
    own = weight_file_bytes(model.manifest) - model.manifest.files.get(HEAD_WEIGHTS_FILE, 0)
    return SMALL_STEP * weight_bytes / own if own else 0.0


def check_same_vocabulary(model: Model, draft: Model) -> None:
    """Refuse a draft model whose tokens mean something else. Raises ConfigError."""
    try:
        differ = model.tokenizer.vocabulary() != draft.tokenizer.vocabulary()
    except ContractMismatchError:  # a folder without a tokenizer
        differ = model.manifest.vocab_size != draft.manifest.vocab_size
    if differ:
        sizes = model.manifest.vocab_size, draft.manifest.vocab_size
        raise ConfigError(
            f"DraftModel: {draft.folder} has another vocabulary ({sizes[1]} tokens) than {model.folder} ({sizes[0]}); "
            "choose a smaller model with the same tokenizer"
        )


def check_speculation(given: Speculation | None) -> Speculation | None:
    """Return speculation options; None: no drafts. Raises ConfigError where it is something else."""
    if given is not None and not isinstance(given, Speculation):
        raise ConfigError(
            f"speculation is {given!r}; it must be None, or an ortolan.PromptLookup, a DraftModel or an MtpHead"
        )
    return given
