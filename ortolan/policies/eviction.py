"""Eviction options as a value: what all policies share, and what the runtime asks of any of them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ortolan.errors import ConfigError
from ortolan.policies.base import OPTION, Option, OptionValue, switch, whole
from ortolan.policies.parts import Kept, Parts, PieceParts, Tensor

if TYPE_CHECKING:
    from ortolan.manifest import Manifest

STRUCTURE_METADATA = "ortolan.eviction"  # key of `Eviction.structure`, as JSON, in the metadata of evict.onnx
DEFAULT_POLICY = "snapkv"
SCORE_ARRAYS = 32  # of a layer's scores, ranks and positions, in float32 each; some graphs take 8 layers at once
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """One layer's cache of one sequence: C slots, Hq query heads, Hkv kv heads of size D."""

    slots: int
    num_heads: int
    num_kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondReading:
    """How a policy has the text read again, behind itself, so that the queries of that reading score.

    Attributes:
        piece_tokens: the most tokens whose queries score at once.
        lead_tokens: the most tokens before them that are read with them.
    """

    piece_tokens: int
    lead_tokens: int

    @property
    def step_tokens(self) -> int:
        """The most tokens of one step."""
        return self.piece_tokens + self.lead_tokens


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Eviction:
    """Eviction by a policy: `Eviction(policy=..., budget=..., **options of the policy)`.

    It fires after a prefill that leaves more than `budget` tokens in a full-attention cache. The result is an instance
    of the policy's class, so that it has the policy's options as attributes.

    Attributes:
        policy: which positions are kept: a name of `ortolan.policies.POLICIES`.
        budget: tokens kept in each full-attention layer.
        window: last queries that score, whose positions are always kept.
        sink: first positions, always kept.
        during_prefill: also evict after each chunk of a prompt, and before a step that the caches have no room for,
            so that no full-attention cache ever holds more than `budget` and a chunk. An approximation: what a chunk
            does not ask for is gone for the rest of the prompt. Refused by policies that keep uneven lengths.
        summary: what the policy keeps, in a few words.
        keeps_uneven: whether the policy lets some layer or head keep more than `budget`.
        needs_rope: whether the policy needs the model's RoPE frequencies.
    """

    policy: str
    budget: int = field(default=2048, metadata=whole("tokens kept in each full-attention layer", most=None))
    window: int = field(default=64, metadata=whole("last queries that score; their positions are always kept"))
    sink: int = field(default=4, metadata=whole("first positions, always kept", least=0))
    during_prefill: bool = field(default=False, metadata=switch("also evict after each chunk of the prompt"))

    summary: ClassVar[str] = ""
    keeps_uneven: ClassVar[bool] = False
    needs_rope: ClassVar[bool] = False

    def __new__(cls, /, *, policy: str | None = None, **options: Any) -> Eviction:
        """Make an instance of the policy's class.

        Raises:
            ConfigError: the policy or an option does not exist, or has a value that is not allowed.
        """
        chosen = _class_of(cls, policy)
        _check_names(chosen, options)
        return object.__new__(chosen)

    def __post_init__(self) -> None:
        for name, declared in self.declared_options().items():  # NumPy's numbers become Python's
            object.__setattr__(self, name, declared.check(f"eviction {name}", getattr(self, name)))
        if self.budget < self.window + self.sink:
            raise ConfigError(
                f"eviction budget is {self.budget}; it must be at least {self.window + self.sink}, because window "
                f"{self.window} and sink {self.sink} are always kept"
            )
        if self.during_prefill and self.keeps_uneven:
            even = [name for name, policy in _registry().items() if not policy.keeps_uneven]
            raise ConfigError(
                f"eviction during_prefill is True; policy {self.policy!r} does not allow it, because it "
                f"keeps more than the budget in some caches; use one of: {', '.join(even)}"
            )

    @classmethod
    def declared_options(cls) -> dict[str, Option]:
        """Map the names of the policy's options to what they may be."""
        return {each.name: each.metadata[OPTION] for each in dataclasses.fields(cls) if OPTION in each.metadata}

    @classmethod
    def from_dict(cls, values: Mapping[str, OptionValue]) -> Eviction:
        """Rebuild what `options_dict` gave.

        Raises:
            ConfigError: an option is missing, or the policy does not have it, or does not allow its value.
        """
        options: dict[str, Any] = dict(values)
        eviction = Eviction(**options)
        missing = sorted(eviction.options_dict().keys() - values.keys())
        if missing:
            raise ConfigError(f"eviction options are incomplete; missing: {', '.join(missing)}")
        return eviction

    def options_dict(self) -> dict[str, OptionValue]:
        """Return the policy and all its options, as JSON holds them."""
        return dataclasses.asdict(self)

    @property
    def structure(self) -> dict[str, OptionValue]:
        """The policy and the options that shape its graph; the others are inputs of the graph, or sizes of them."""
        shaping = [name for name, declared in self.declared_options().items() if declared.shapes_graph]
        return {"policy": self.policy} | {name: getattr(self, name) for name in shaping}

    @property
    def captured_queries(self) -> int:
        """Rows of the capture buffers that the policy needs."""
        return self.window

    @property
    def second_reading(self) -> SecondReading | None:
        """How the text is read again, so that `score_piece` scores; None: the captured queries do."""
        return None

    @property
    def shares_lists(self) -> bool:
        """Whether the kv heads of a layer share one list of kept positions; a policy may not let them choose."""
        return getattr(self, "granularity", "kv_head") != "kv_head"

    def workspace_bytes(self, cache: CacheShape) -> int:
        """Return about how many bytes the eviction of a layer takes besides its cache."""
        return FLOAT32_BYTES * SCORE_ARRAYS * cache.slots * cache.num_kv_heads

    def check(self, manifest: Manifest) -> None:
        """Check that a model has what the policy needs.

        Raises:
            ConfigError: the model cannot evict, or lacks RoPE frequencies that the policy needs.
        """
        if not any(layer.evictable for layer in manifest.layers):
            raise ConfigError(
                "no layer of this model can evict: all layers have sliding windows, or the model was exported with "
                "snapkv_window=0; export it again with snapkv_window above 0, or turn eviction off"
            )
        if self.needs_rope and manifest.ropes is None:
            raise ConfigError(
                f"eviction policy {self.policy!r} needs RoPE frequencies, which this model folder does not have; "
                "choose another policy, or export the model again (a converted model never has them)"
            )

    def score_piece(self, parts: PieceParts) -> dict[int, Tensor]:
        """Build the graph that scores by one piece of a second reading; returns [B, Hkv, C] of each evictable layer."""
        raise AssertionError(f"the class of policy {self.policy!r} does not say how a second reading scores")

    def keep(self, parts: Parts) -> dict[int, Kept]:
        """Build the policy's graph; returns what is kept of each evictable layer."""
        raise AssertionError(f"the class of policy {self.policy!r} does not say what it keeps")


def _registry() -> dict[str, type[Eviction]]:
    """Return the policies by name; imported late, because the registry imports the policies, which are Evictions."""
    from ortolan.policies import POLICIES

    return POLICIES


def _class_of(cls: type[Eviction], policy: object) -> type[Eviction]:
    """Return the class of the policy that was asked for, by its name or by its class."""
    policies = _registry()
    if cls is Eviction:
        name = DEFAULT_POLICY if policy is None else policy
        if not isinstance(name, str) or name not in policies:
            raise ConfigError(
                f"eviction policy is {policy!r}; allowed: {', '.join(policies)}{_did_you_mean(policy, policies)}"
            )
        return policies[name]
    if policy is not None and (not isinstance(policy, str) or policies.get(policy) is not cls):
        raise ConfigError(
            f"{cls.__name__} does not take policy {policy!r}; use ortolan.Eviction(policy={policy!r}, ...)"
        )
    return cls


def _check_names(cls: type[Eviction], given: Collection[str]) -> None:
    """Raise ConfigError for an option that the policy does not have."""
    known = cls.declared_options()
    for name in given:
        if name in known:
            continue
        others = [policy for policy, other in _registry().items() if name in other.declared_options()]
        hint = f"; policies that have it: {', '.join(others)}; choose one with ortolan.Eviction(policy=...)"
        hint = hint if others else _did_you_mean(name, known)
        raise ConfigError(f"{_describe(cls)} does not have option {name!r}; its options: {', '.join(known)}{hint}")


def _describe(cls: type[Eviction]) -> str:
    """Name a policy as a message does."""
    (policy,) = (each for each in dataclasses.fields(cls) if each.name == "policy")
    return f"eviction policy {policy.default!r}"


def _did_you_mean(given: object, allowed: Collection[str]) -> str:
    near = difflib.get_close_matches(str(given), allowed, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
