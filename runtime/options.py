"""What a caller may choose about a session: eviction and sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ortolan.errors import ConfigError

POLICIES = ("snapkv", "streaming", "pyramidkv", "adakv")
POOLS = ("avg", "max")
GRANULARITIES = ("kv_head", "layer", "model")
GROUP_REDUCES = ("mean", "max", "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKv:
    """SnapKV eviction, which fires after a prefill that leaves more than `budget` tokens in a cache.

    Attributes:
        budget: tokens kept in each full-attention layer.
        window: last queries that score, whose positions are always kept.
        kernel: odd width of the pooling along positions.
        pool: "avg" or "max".
        sink: first positions, always kept.
        granularity: who shares a keep-list: "kv_head", "layer" or "model".
        group_reduce: over the query heads of a kv head: "mean", "max" or "sum".
        policy: what is kept: "snapkv" (the best-scored), "streaming" (sinks and the latest), "pyramidkv" (SnapKV with
            more for early layers; `budget` is the average) or "adakv" (SnapKV whose kv heads share `budget` times
            their number).

    Source: arXiv 2404.14469; the policies name theirs in `ortolan.graphs.policies`.
    """

    budget: int = 2048
    window: int = 64
    kernel: int = 5
    pool: str = "avg"
    sink: int = 4
    granularity: str = "kv_head"
    group_reduce: str = "mean"
    policy: str = "snapkv"

    def __post_init__(self) -> None:
        for name, least in (("budget", 1), ("window", 1), ("kernel", 1), ("sink", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"SnapKv {name} is {value!r}; it must be a whole number, at least {least}")
        if self.kernel % 2 == 0:
            raise ConfigError(f"SnapKv kernel is {self.kernel}; it must be odd, so that pooling keeps its length")
        if self.budget < self.window + self.sink:
            raise ConfigError(
                f"SnapKv budget {self.budget} does not hold window {self.window} and sink {self.sink}, "
                "which are always kept"
            )
        for name, allowed in (
            ("pool", POOLS),
            ("granularity", GRANULARITIES),
            ("group_reduce", GROUP_REDUCES),
            ("policy", POLICIES),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"SnapKv {name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")

    @property
    def structure(self) -> dict[str, int | str]:
        """The options that shape the eviction graph; the others are inputs of it."""
        return {
            "policy": self.policy,
            "kernel": self.kernel,
            "pool": self.pool,
            "granularity": self.granularity,
            "group_reduce": self.group_reduce,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is chosen from logits.

    Applied in this order: repetition penalty, temperature, top_k, top_p, min_p.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: keep that many; 0 keeps all.
        top_p: keep the smallest set with that much probability.
        min_p: keep tokens with at least that share of the best one's probability.
        repetition_penalty: above 1 makes tokens of the sequence so far less likely.
        seed: of the random numbers; None draws a fresh one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        rules = (
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("seed", self.seed is None or self.seed >= 0, "None or at least 0"),
        )
        for name, holds, rule in rules:
            value = getattr(self, name)
            if not holds or (value is not None and not math.isfinite(value)):
                raise ConfigError(f"Sampling {name} is {value!r}; it must be {rule}")
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise ConfigError(f"Sampling {name} is {value!r}; it must be a whole number")
