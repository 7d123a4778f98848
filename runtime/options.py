"""What a caller may choose about a session: eviction and sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ortolan.errors import MAX_LENGTH, ConfigError, finite_number, one_of, truth, whole_number
from ortolan.manifest import Manifest

POLICIES = ("snapkv", "streaming", "pyramidkv", "adakv", "expected")
UNEVEN_POLICIES = ("pyramidkv", "adakv")  # some layer or head may keep more than the budget
EXPECTED_QUERIES = 256  # captured for the statistics of policy "expected", unless told otherwise
POOLS = ("avg", "max")
GRANULARITIES = ("kv_head", "layer", "model")
OWN_BUDGETS = {"adakv": ("kv_head",), "pyramidkv": ("kv_head", "layer")}  # who may share a list where budgets differ
GROUP_REDUCES = ("mean", "max", "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKv:
    """SnapKV eviction, which fires after a prefill that leaves more than `budget` tokens in a cache.

    Attributes:
        budget: tokens kept in each full-attention layer.
        window: last queries that score, whose positions are always kept.
        kernel: odd width of the pooling along positions; at most 2 * max_context + 1 of the model.
        pool: "avg" or "max".
        sink: first positions, always kept.
        granularity: who shares a keep-list: "kv_head", "layer" or "model". Those whose budgets differ cannot: policy
            "adakv" takes "kv_head" alone, "pyramidkv" not "model".
        group_reduce: over the query heads of a kv head: "mean", "max" or "sum".
        policy: what is kept: "snapkv" (the best-scored), "streaming" (sinks and the latest), "pyramidkv" (SnapKV with
            more for early layers: `budget` on average, or a little more where last layers are lifted to window and
            sinks), "adakv" (SnapKV whose kv heads share `budget` times their number) or "expected" (what queries to
            come are expected to attend to; it does not pool).
        queries: last queries of whose mean and covariance policy "expected" expects the next ones; None takes 256,
            or `window` where that is more. Other policies score by `window` queries and take None alone.
        during_prefill: also evict after each chunk of a prompt, and before a step that the caches have no room for,
            so that no full-attention cache ever holds more than `budget` and a chunk. An approximation: what a chunk
            does not ask for is gone for the rest of the prompt. Not with policies that keep more than `budget`
            somewhere ("pyramidkv", "adakv").

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
    queries: int | None = None
    during_prefill: bool = False

    def __post_init__(self) -> None:
        _set(self, "budget", whole_number("SnapKv budget", self.budget))  # one beyond any length never evicts
        for name, least in (("window", 1), ("kernel", 1), ("sink", 0)):
            _set(self, name, whole_number(f"SnapKv {name}", getattr(self, name), least, MAX_LENGTH))
        if self.kernel % 2 == 0:
            raise ConfigError(f"SnapKv kernel is {self.kernel}; it must be odd, so that pooling keeps its length")
        if self.budget < self.window + self.sink:
            raise ConfigError(
                f"SnapKv budget {self.budget} does not hold window {self.window} and sink {self.sink}, "
                "which are always kept"
            )
        self._check_queries()
        self._check_during_prefill()
        for name, allowed in (
            ("pool", POOLS),
            ("granularity", GRANULARITIES),
            ("group_reduce", GROUP_REDUCES),
            ("policy", POLICIES),
        ):
            one_of(f"SnapKv {name}", getattr(self, name), allowed)
        sharing = OWN_BUDGETS.get(self.policy, GRANULARITIES)
        if self.granularity not in sharing:
            raise ConfigError(
                f"SnapKv policy {self.policy!r} gives budgets of their own to those that granularity "
                f"{self.granularity!r} lets share a list; granularity must be {' or '.join(sharing)}"
            )

    def _check_queries(self) -> None:
        given = self.queries
        if given is None:
            return
        if self.policy != "expected":
            raise ConfigError(f"SnapKv queries is {given!r}; only policy 'expected' takes it, others score by window")
        _set(self, "queries", whole_number("SnapKv queries", given, 1, MAX_LENGTH))

    def _check_during_prefill(self) -> None:
        truth("SnapKv during_prefill", self.during_prefill)
        if self.during_prefill and self.policy in UNEVEN_POLICIES:
            raise ConfigError(
                f"SnapKv during_prefill bounds every cache by the budget, but policy {self.policy!r} lets some hold "
                f"more; use one of {', '.join(p for p in POLICIES if p not in UNEVEN_POLICIES)}"
            )

    @property
    def captured_queries(self) -> int:
        """Rows of the capture buffers that the policy needs."""
        if self.policy != "expected":
            return self.window
        return self.queries or max(self.window, EXPECTED_QUERIES)

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
        repetition_penalty: above 1 makes tokens of the sequence so far less likely; from 1e-6 to 1e6.
        seed: of the random numbers; None draws a fresh one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        rules: tuple[tuple[str, Callable[[float], bool], str], ...] = (
            ("temperature", lambda value: value >= 0, "of at least 0"),
            ("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
            ("min_p", lambda value: 0 <= value <= 1, "from 0 to 1"),
            ("repetition_penalty", lambda value: 1e-6 <= value <= 1e6, "from 1e-6 to 1e6"),
        )
        for name, holds, rule in rules:
            number = finite_number(getattr(self, name))
            if number is None or not holds(number):
                raise ConfigError(f"Sampling {name} is {getattr(self, name)!r}; it must be a finite number {rule}")
            _set(self, name, number)
        _set(self, "top_k", whole_number("Sampling top_k", self.top_k, 0))
        if self.seed is not None:
            _set(self, "seed", whole_number("Sampling seed", self.seed, 0))


def check_sampling(given: Sampling | None) -> Sampling:
    """Return sampling options; None takes the most likely token. Raises ConfigError where it is something else."""
    if given is None:
        return Sampling()
    if not isinstance(given, Sampling):
        raise ConfigError(f"sampling is {given!r}; it must be an ortolan.Sampling, or None")
    return given


def check_snapkv(given: SnapKv | None, manifest: Manifest) -> None:
    """Check that eviction options are such, and that a model has what they need. Raises ConfigError."""
    if given is None:
        return
    if not isinstance(given, SnapKv):
        raise ConfigError(f"snapkv is {given!r}; it must be an ortolan.SnapKv, or None")
    if not any(layer.evictable for layer in manifest.layers):
        raise ConfigError(
            "snapkv: no layer of this model can evict; it has only sliding windows, or was exported with "
            "snapkv_window=0"
        )
    if given.policy == "expected" and manifest.ropes is None:
        raise ConfigError(
            "snapkv: policy 'expected' needs RoPE frequencies, which this model folder lacks; a converted model never "
            "has them: choose another policy; one that was exported gets them when it is exported again"
        )
    widest = 2 * manifest.max_context + 1  # reaches all positions from each; wider ones only take longer
    if given.kernel > widest:
        raise ConfigError(
            f"SnapKv kernel is {given.kernel}; at most {widest} in a model of max_context {manifest.max_context}"
        )


def _set(options: SnapKv | Sampling, name: str, value: float) -> None:
    """Set an attribute of options that are frozen: while they are made, NumPy's numbers become Python's."""
    object.__setattr__(options, name, value)
