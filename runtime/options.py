"""What a caller may choose about how tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortolan.errors import ConfigError, finite_number, whole_number

if TYPE_CHECKING:
    from ortolan.runtime.model import Model


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

    @classmethod
    def from_model(cls, model: Model) -> Sampling:
        """Return the sampling that the model's authors recommend, in generation_config.json of its folder.

        What the file leaves out is off; without `do_sample`, or without the file, the most likely token is taken. Keys
        that Ortolan does not have are named in a warning of the log `ortolan`, once for each model.

        Raises:
            ContractMismatchError: the file cannot be read, or has values that are not allowed.
        """
        return model.recommended_sampling

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


def _set(options: Sampling, name: str, value: float) -> None:
    """Set an attribute of options that are frozen: while they are made, NumPy's numbers become Python's."""
    object.__setattr__(options, name, value)
